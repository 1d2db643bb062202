"""The table of prompts: ids, checks, system prompt, and the held-out share."""

from typing import Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rloo_pipeline import seeds
from rloo_pipeline.config import PromptsConfig
from rloo_pipeline.errors import UserError
from rloo_pipeline.schema import RESERVED_COLUMNS, reward_column

MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))


def prompt_table(rows: pa.Table, config: PromptsConfig, split: Literal["train", "eval"], source: str) -> pa.Table:
    """prompt_id, prompt (string or list<struct<role, content>>) and every column of `rows`, in their order.

    Ids are the column prompt_id if there is one, else <split>-<index>. Raises UserError that names `source`, row
    (counted from 1) and column.
    """
    if rows.num_rows == 0:
        raise UserError(f"{source}: no rows; prompts.{split} needs at least one")
    _check_names(rows, config.prompt_column, source)
    ids = _ids(rows, split, source)
    prompt = _prompts(rows[config.prompt_column], f"{source}, column {config.prompt_column}")
    if config.system_prompt is not None:
        prompt = _with_system(prompt, config.system_prompt, source)
    rest = {name: rows[name] for name in rows.column_names if name not in ("prompt_id", "prompt")}
    return pa.table({"prompt_id": ids, "prompt": prompt, **rest})


def split_rows(prompts: pa.Table, fraction: float, seed: int) -> tuple[pa.Table, pa.Table]:
    """Prompts to train on and about `fraction` of them held out, by a hash of (seed, prompt_id).

    A row's side depends on nothing but its id, so adding rows moves none. Raises UserError if a side is empty.
    """
    threshold = fraction * 2.0**63
    held_out_P = np.array([seeds.derive(seed, "eval", key) < threshold for key in prompts["prompt_id"].to_pylist()])
    if held_out_P.all() or not held_out_P.any():
        raise UserError(
            f"prompts.eval.fraction {fraction}: of {prompts.num_rows} prompts {held_out_P.sum()} would be held out; "
            "give more prompts, another fraction or a dataset of their own to eval"
        )
    return prompts.filter(pa.array(~held_out_P)), prompts.filter(pa.array(held_out_P))


def is_conversational(prompt: pa.ChunkedArray | pa.Array) -> bool:
    """Whether prompts are messages rather than strings."""
    return bool(pa.types.is_list(prompt.type))


def _check_names(rows: pa.Table, prompt_column: str, source: str) -> None:
    names = rows.column_names
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"{source}: two columns have the name {name}; rename one")
        if name in RESERVED_COLUMNS or name.startswith(reward_column("")):
            raise UserError(f"{source}: column {name} has a name that the pipeline uses itself; rename the column")
    if prompt_column not in names:
        raise UserError(
            f"{source}: no column {prompt_column}; there are {', '.join(names)}; set prompts.prompt_column "
            "to one of them"
        )
    if prompt_column != "prompt" and "prompt" in names:
        raise UserError(
            f"{source}: prompts.prompt_column is {prompt_column}, but there is a column prompt too, which it would "
            "take the place of; rename or drop one"
        )


def _ids(rows: pa.Table, split: str, source: str) -> pa.Array:
    if "prompt_id" not in rows.column_names:
        return pa.array([f"{split}-{index:06d}" for index in range(rows.num_rows)], pa.string())
    given = rows["prompt_id"].combine_chunks()
    if not (pa.types.is_integer(given.type) or _is_text(given.type)):
        raise UserError(f"{source}: column prompt_id is of type {given.type}; ids are strings or whole numbers")
    ids = given.cast(pa.string())
    _refuse(pc.fill_null(pc.equal(ids, ""), True), f"{source}, column prompt_id", "no id; give one or drop the column")
    first = pc.index_in(ids, value_set=ids).to_numpy(zero_copy_only=False)
    repeated = np.flatnonzero(first != np.arange(len(ids)))
    if repeated.size:
        row = int(repeated[0])
        raise UserError(
            f"{source}: rows {first[row] + 1} and {row + 1} have the same prompt_id {ids[row].as_py()!r}; ids must "
            "differ: rename one, remove it, or drop the column to have ids made"
        )
    return ids


def _prompts(column: pa.ChunkedArray, where: str) -> pa.Array:
    column = column.combine_chunks()
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if _is_text(column.type):
        prompt = column.cast(pa.string())
        _refuse(_blank(prompt), where, "an empty prompt; fill or remove it")
        return prompt
    if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
        return _messages(column, where)
    if pa.types.is_null(column.type):
        raise UserError(f"{where}, row 1: an empty prompt; fill or remove it")
    raise UserError(
        f"{where}: its type is {column.type}; a prompt is a string, or a list of messages with role and content"
    )


def _messages(column: pa.Array, where: str) -> pa.Array:
    _refuse(pc.fill_null(pc.equal(pc.list_value_length(column), 0), True), where, "no message; fill or remove it")
    flat, parents = pc.list_flatten(column), pc.list_parent_indices(column).to_numpy()
    if not pa.types.is_struct(flat.type) or not {"role", "content"} <= {field.name for field in flat.type}:
        raise UserError(f"{where}: its type is {column.type}; each message needs role and content")
    for field in flat.type:
        values = pc.struct_field(flat, field.name)
        if field.name not in ("role", "content"):
            _refuse_message(pc.is_valid(values), parents, where, f"a message with {field.name}; only role and content")
        elif _is_text(field.type) or pa.types.is_null(field.type):
            _refuse_message(pc.is_null(values), parents, where, f"a message without {field.name}; fill or remove it")
        else:
            raise UserError(f"{where}: {field.name} of the messages is of type {field.type}; it must be a string")
    role, content = (pc.struct_field(flat, name).cast(pa.string()) for name in ("role", "content"))
    spoken = np.unique(parents[~_blank(content).to_numpy(zero_copy_only=False)])
    silent = np.setdiff1d(np.arange(len(column)), spoken)
    if silent.size:
        raise UserError(f"{where}, row {silent[0] + 1}: every message is empty; fill or remove the row")
    return _nested(role, content, np.bincount(parents, minlength=len(column)))


def _nested(role: pa.Array, content: pa.Array, counts_P: npt.NDArray[np.int64]) -> pa.Array:
    offsets = np.concatenate([[0], np.cumsum(counts_P)]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.StructArray.from_arrays([role, content], ["role", "content"]))


def _with_system(prompt: pa.Array, text: str, source: str) -> pa.Array:
    system = {"role": "system", "content": text}
    if not is_conversational(prompt):
        return pa.array([[system, {"role": "user", "content": value}] for value in prompt.to_pylist()], MESSAGES)
    messages = prompt.to_pylist()
    for row, value in enumerate(messages, start=1):
        if value[0]["role"] == "system":
            raise UserError(f"{source}, row {row}: has a system message of its own; leave prompts.system_prompt out")
    return pa.array([[system, *value] for value in messages], MESSAGES)


def _is_text(kind: pa.DataType) -> bool:
    return any(check(kind) for check in (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view))


def _blank(texts: pa.Array) -> pa.Array:
    return pc.fill_null(pc.equal(pc.utf8_trim_whitespace(texts), ""), True)


def _refuse(bad: pa.Array, where: str, what: str) -> None:
    rows = np.flatnonzero(bad.to_numpy(zero_copy_only=False))
    if rows.size:
        more = f" (and {rows.size - 1} more)" if rows.size > 1 else ""
        raise UserError(f"{where}, row {rows[0] + 1}{more}: {what}")


def _refuse_message(bad: pa.Array, parents: npt.NDArray[np.int64], where: str, what: str) -> None:
    at = np.flatnonzero(bad.to_numpy(zero_copy_only=False))
    if at.size:
        raise UserError(f"{where}, row {parents[at[0]] + 1}: {what}")
