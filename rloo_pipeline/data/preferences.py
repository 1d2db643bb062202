"""Preference pairs as TRL takes them: strings or messages, the prompt in a column or within both completions."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from rloo_pipeline import seeds
from rloo_pipeline.data.keep import Rows
from rloo_pipeline.data.prompts import MESSAGES
from rloo_pipeline.errors import UserError

IDENTICAL = "identical: chosen and rejected are the same"
Side = Literal["chosen", "rejected"]


@dataclass(frozen=True)
class _Row:
    prompt: Any
    chosen: Any
    rejected: Any
    margin: float


def pair_table(rows: Rows, split: str) -> pa.Table:
    """pair_id (<split>-<row of the dataset, from 0>), prompt, chosen, rejected and margin (float64, 0 by default).

    Texts are all strings or all messages. Without a column prompt it is what chosen and rejected begin with, as in
    TRL's extract_prompt. Raises UserError that names the dataset, its row (counted from 1) and the column.
    """
    table, source = rows.table, rows.source
    if table.num_rows == 0:
        raise UserError(f"{source}: no rows; a reward model needs pairs")
    for name in ("chosen", "rejected"):
        if name not in table.column_names:
            raise UserError(
                f"{source}: no column {name}; there are {', '.join(table.column_names)}; name it under columns, as in "
                f"columns: {{{name}: <its name>}}"
            )
    read = [name for name in ("prompt", "chosen", "rejected", "margin") if name in table.column_names]
    pairs = [_row(row, rows.place(index)) for index, row in enumerate(table.select(read).to_pylist())]
    kinds = [isinstance(pair.chosen, str) for pair in pairs]
    if kinds.count(kinds[0]) < len(kinds):
        place = rows.place(kinds.index(not kinds[0]))
        raise UserError(f"{place}: messages and strings do not go together; give all rows one kind")
    kind = pa.string() if kinds[0] else MESSAGES
    columns = {
        name: pa.array([getattr(pair, name) for pair in pairs], kind) for name in ("prompt", "chosen", "rejected")
    }
    ids = pa.array([f"{split}-{place:06d}" for place in rows.places_N], pa.string())
    return pa.table({"pair_id": ids, **columns, "margin": pa.array([pair.margin for pair in pairs], pa.float64())})


def _row(row: dict[str, Any], where: str) -> _Row:
    chosen, rejected = (_text(row[name], f"{where}, column {name}") for name in ("chosen", "rejected"))
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise UserError(f"{where}: chosen and rejected are of two kinds; give both as strings or both as messages")
    prompt = _text(row["prompt"], f"{where}, column prompt") if "prompt" in row else None
    if prompt is not None and isinstance(prompt, str) == isinstance(chosen, str):
        if isinstance(prompt, list) and chosen[: len(prompt)] == prompt:
            raise UserError(
                f"{where}: chosen begins with the prompt, which would be read twice; drop the column prompt"
            )
    else:
        # Some datasets have the prompt as a string beside whole conversations, which hold it too.
        shared = _shared(chosen, rejected)
        prompt, chosen, rejected = chosen[:shared], chosen[shared:], rejected[shared:]
    for name, side in (("chosen", chosen), ("rejected", rejected)):
        if isinstance(side, list) and side[-1]["role"] != "assistant":
            raise UserError(
                f"{where}, column {name}: the last message is of role {side[-1]['role']}; a completion ends with "
                "one of the assistant"
            )
    return _Row(prompt, chosen, rejected, _margin(row.get("margin"), where))


def _shared(chosen: Sequence[Any], rejected: Sequence[Any]) -> int:
    """How many characters or messages both begin with; at least one is left to each, as in TRL's extract_prompt."""
    limit = max(min(len(chosen), len(rejected)) - 1, 0)
    first = next((index for index in range(limit) if chosen[index] != rejected[index]), limit)
    # The space before a completion belongs to it: tokenizers join it to the word.
    return first - 1 if first and chosen[first - 1] == " " else first


def _text(value: Any, where: str) -> Any:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        found = "no value" if value is None else f"a {type(value).__name__}"
        raise UserError(f"{where}: {found}; it is a string, or a list of messages with role and content")
    if not value:
        raise UserError(f"{where}: no message; fill or remove the row")
    return [_message(message, f"{where}, message {number}") for number, message in enumerate(value, start=1)]


def _message(message: Any, where: str) -> dict[str, str]:
    if not isinstance(message, dict):
        raise UserError(f"{where}: a {type(message).__name__}; each message has role and content")
    for key in ("role", "content"):
        if not isinstance(message.get(key), str):
            raise UserError(f"{where}: {key} is missing or no string; each message has role and content")
    further = [key for key, value in message.items() if key not in ("role", "content") and value is not None]
    if further:
        raise UserError(f"{where}: has {', '.join(further)} too; only role and content are read")
    return {"role": message["role"], "content": message["content"]}


def _margin(value: Any, where: str) -> float:
    if value is None:
        return 0.0
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise UserError(f"{where}, column margin: {value!r} is no finite number; leave it empty for none")
    return float(value)


def side_rows(pairs: pa.Table, side: Side) -> pa.Table:
    """One side of the pairs as the reward stage has completions: columns prompt and completion_text.

    The text is that of the last message; those of the completion before it go to the prompt.
    """
    prompts, completions = pairs["prompt"].to_pylist(), pairs[side].to_pylist()
    if isinstance(completions[0], list):
        prompts = [[*prompt, *messages[:-1]] for prompt, messages in zip(prompts, completions, strict=True)]
        completions = [messages[-1]["content"] for messages in completions]
    kind = pairs["prompt"].type
    return pa.table({"prompt": pa.array(prompts, kind), "completion_text": pa.array(completions, pa.string())})


def split_pairs(pairs: pa.Table, fraction: float, seed: int) -> tuple[pa.Table, pa.Table]:
    """Pairs to train on and about `fraction` of them held out, all pairs of a prompt on one side.

    A pair's side depends on nothing but its prompt (on its whole text without one). UserError if a side is empty.
    """
    threshold = fraction * 2.0**63
    held_out = np.array([seeds.derive(seed, "pairs", key) < threshold for key in _keys(pairs)])
    if held_out.all() or not held_out.any():
        raise UserError(
            f"eval.fraction {fraction}: of {pairs.num_rows} pairs {held_out.sum()} would be held out, all pairs of a "
            "prompt on one side; give pairs of more prompts, another fraction, or a table of its own to eval"
        )
    return pairs.filter(pa.array(~held_out)), pairs.filter(pa.array(held_out))


def _keys(pairs: pa.Table) -> list[str]:
    return [
        json.dumps(row["prompt"] or [row["chosen"], row["rejected"]], ensure_ascii=False)
        for row in pairs.select(["prompt", "chosen", "rejected"]).to_pylist()
    ]


def shared_pairs(train: pa.Table, held_out: pa.Table) -> int:
    """How many held-out pairs are trained on too, in whichever order."""
    trained = {_unordered(row) for row in train.to_pylist()}
    return sum(_unordered(row) in trained for row in held_out.to_pylist())


def _unordered(row: dict[str, Any]) -> tuple[str, ...]:
    return (str(row["prompt"]), *sorted((str(row["chosen"]), str(row["rejected"]))))


def fits(
    pairs: pa.Table, chosen_tokens: Sequence[int], rejected_tokens: Sequence[int], limit: int
) -> tuple[np.ndarray, dict[str, str]]:
    """`kept_N` (bool) and the reason of each pair left out, by pair_id: identical sides, no tokens, too long."""
    same = [row["chosen"] == row["rejected"] for row in pairs.select(["chosen", "rejected"]).to_pylist()]
    reasons = {}
    for pair_id, alike, chosen, rejected in zip(
        pairs["pair_id"].to_pylist(), same, chosen_tokens, rejected_tokens, strict=True
    ):
        if alike:
            reasons[pair_id] = IDENTICAL
        elif min(chosen, rejected) == 0:
            reasons[pair_id] = f"no tokens: {'rejected' if chosen else 'chosen'} is empty"
        elif max(chosen, rejected) > limit:
            longer = "chosen" if chosen >= rejected else "rejected"
            reasons[pair_id] = f"too long: {max(chosen, rejected)} tokens with {longer}, the limit is {limit}"
    return np.array([pair_id not in reasons for pair_id in pairs["pair_id"].to_pylist()], bool), reasons
