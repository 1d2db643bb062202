"""What a reward service is sent and what it answers: a superset of OpenRLHF's remote reward models."""

import base64
import json
import math
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rloo_pipeline.rewards.call import dataset_columns
from rloo_pipeline.rewards.scored import Scored
from rloo_pipeline.tracking.secrets import without

PROTOCOL = 1
SHOWN = 200  # characters of an answer in a message
LARGEST = float(np.finfo(np.float32).max)


class Refused(Exception):
    """Why a request gave no scores at all; the text goes on from the service's address."""


def request(rows: pa.Table) -> bytes:
    """The JSON body for `rows`, completions joined with their prompts' columns."""
    texts = pc.binary_join_element_wise(rows["prompt_text"], rows["completion_text"], "")
    labels = rows["label"].to_pylist() if "label" in rows.column_names else [""] * rows.num_rows
    content = {
        "protocol": PROTOCOL,
        "query": texts.to_pylist(),
        "prompts": rows["prompt_text"].to_pylist(),
        "labels": labels,
        "completions": rows["completion_text"].to_pylist(),
        "columns": {name: rows[name].to_pylist() for name in ("prompt", *dataset_columns(rows))},
    }
    return json.dumps(_plain(content), ensure_ascii=False, allow_nan=False).encode()


def _plain(value: Any) -> Any:
    """The value as JSON has it: bytes in base64, times in ISO 8601, NaN and infinities as null."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | int):
        return value
    return value.isoformat() if hasattr(value, "isoformat") else str(value)


def read_answer(body: bytes, rows: int, token: str | None) -> Scored:
    """Scores and errors of an answer to a request of `rows` rows; raises Refused if it cannot be told whose they are.

    What is quoted from the answer is without `token`.
    """
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError) as error:
        text = body.decode("utf-8", "replace")
        raise Refused(f"gave an answer that is not JSON: {shown(text, token)}") from error
    key = "rewards" if not isinstance(answer, dict) or "rewards" in answer else "scores"
    rewards = answer.get(key) if isinstance(answer, dict) else None
    if not isinstance(rewards, list):
        raise Refused(f'gave an answer without a list under "rewards": {shown(json.dumps(answer), token)}')
    reasons = answer.get("errors") or [None] * rows
    for name, values in ((key, rewards), ("errors", reasons)):
        if not isinstance(values, list) or len(values) != rows:
            count = f"{len(values)} {name}" if isinstance(values, list) else f"no list under {name!r}"
            raise Refused(f"gave {count} for {rows} completions: whose they are is unknown, so none is used")
    errors = {row: reason for row in range(rows) if (reason := _error(rewards[row], reasons[row], token))}
    scores_N = [math.nan if row in errors or value is None else float(value) for row, value in enumerate(rewards)]
    return Scored(np.array(scores_N, np.float64), errors)


def _error(value: Any, reason: Any, token: str | None) -> str | None:
    """Why a row has no score, if its reward cannot be one or the service says so."""
    if reason:
        return f"the service says {shown(reason if isinstance(reason, str) else json.dumps(reason), token)}"
    if value is None:
        return None
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST:
        return None
    return f"the service gave {shown(json.dumps(value), token)} for it, which is neither null nor finite in float32"


def shown(text: str, token: str | None) -> str:
    """The beginning of what a service wrote, in quotes, without the token."""
    text = without(token, text)
    return f"{text[:SHOWN]!r}{'...' if len(text) > SHOWN else ''}"
