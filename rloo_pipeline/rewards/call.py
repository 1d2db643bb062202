"""One call of a reward function, as TRL's RLOOTrainer and GRPOTrainer make it, and what may come back from it."""

import functools
import inspect
import json
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa

from rloo_pipeline.data.images import as_seen
from rloo_pipeline.errors import UserError
from rloo_pipeline.schema import CALL_ARGUMENTS, RESERVED_COLUMNS

Arguments = dict[str, Any]
SHOWN, ERROR_SHOWN = 80, 500  # characters of a value and of an exception in a message


class Unusable(Exception):
    """What a function returned cannot be told apart into rows."""


class TrainerState:
    """What a reward function is told of the training."""

    is_world_process_zero = True
    is_local_process_zero = True

    def __init__(self, global_step: int) -> None:
        self.global_step = global_step  # iterations done before these completions were sampled

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"trainer_state has no {name} here, but global_step (iterations done before these completions were "
            "sampled), is_world_process_zero and is_local_process_zero; a chain of iterations can be lengthened, so "
            "give whatever depends on its length in kwargs"
        )


def arguments(rows: pa.Table, state: TrainerState) -> Arguments:
    """Keyword arguments of a call on `rows`: TRL's, and every dataset column. The lists are the caller's own."""
    texts = rows["completion_text"].to_pylist()
    completions: list[Any] = texts
    if pa.types.is_list(rows["prompt"].type):
        completions = [[{"role": "assistant", "content": text}] for text in texts]
    given = {
        "prompts": rows["prompt"].to_pylist(),
        "completions": completions,
        "completion_ids": rows["completion_token_ids"].to_pylist(),
        **{name: rows[name].to_pylist() for name in dataset_columns(rows)},
        "trainer_state": state,
    }
    return given | as_seen(rows)


def dataset_columns(rows: pa.Table) -> list[str]:
    """The columns of `rows` that come from the dataset (prompt_id among them), without the prompt itself."""
    return [name for name in rows.column_names if name not in RESERVED_COLUMNS and name != "prompt"]


def ready(spec: str, found: Callable[..., Any], kwargs: Arguments) -> tuple[Callable[..., Any], Arguments]:
    """What is called for each batch, and with which further arguments.

    A class, or a function that takes none of a reward function's arguments, is called once, with `kwargs`, to make
    the reward function. Raises UserError if that fails or makes nothing that can be called.
    """
    if not (inspect.isclass(found) or _takes_none_of(found, CALL_ARGUMENTS)):
        return found, kwargs
    try:
        made = found(**kwargs)
    except Exception as error:
        raise UserError(
            f"{spec} takes no completions, so it was called to make the reward function, with kwargs "
            f"({', '.join(kwargs) or 'none'}), and raised {told(error)}; mend kwargs, or name the reward function"
        ) from error
    if not callable(made):
        raise UserError(
            f"{spec} takes no completions, so it was called to make the reward function, but it made a "
            f"{type(made).__name__}; a reward function takes completions, or **kwargs"
        )
    return made, {}


def _takes_none_of(function: Callable[..., Any], names: Sequence[str]) -> bool:
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # some functions written in C do not tell
        return False
    any_name = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return not any_name and not any(name in parameters for name in names)


def is_async(function: Any) -> bool:
    """Whether a call gives something to await: a coroutine function, one inside partials, or an object with one."""
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(function.__call__)


def told(error: BaseException) -> str:
    """Type and text of an exception, with a hint where the arguments do not fit."""
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:
        text = f"{type(error).__name__}, which cannot be written as text"
    if len(text) > ERROR_SHOWN:
        text = f"{text[:ERROR_SHOWN]}..."
    if not isinstance(error, TypeError):
        return text
    if " missing " in text and " argument" in text:
        text += (
            " (if it is a column of the dataset, it has another name there: rename it under columns of the dataset, "
            "or add it; if it is a setting, give it in kwargs)"
        )
    if "unexpected keyword argument" in text:
        text += (
            f" (it is called with {', '.join(CALL_ARGUMENTS)} and the columns of the dataset as keyword arguments, so "
            "it needs **kwargs for those that it does not name)"
        )
    return text


class Logs:
    """What a function logs during one call."""

    def __init__(self) -> None:
        self.columns: dict[str, list[Any]] = defaultdict(list)
        self.metrics: dict[str, list[float]] = defaultdict(list)

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """Values of one column, one for each row; several calls add up, as TRL's do."""
        self.columns[str(column)].extend(_plain(value) for value in values)

    def log_metric(self, name: str, value: float) -> None:
        """A number of the whole call; several are averaged, as TRL does."""
        self.metrics[str(name)].append(float(value))

    def told(self, count: int) -> Arguments:
        """As JSON: `extra` by column, `metrics` by name, and `misfits`, what cannot be kept."""
        extra = {column: values for column, values in self.columns.items() if len(values) == count}
        metrics = {name: math.fsum(values) / len(values) for name, values in self.metrics.items()}
        misfits = [
            f"log_extra: column {column} has {len(values)} values for {count} completions and is not kept"
            for column, values in self.columns.items()
            if column not in extra
        ]
        misfits += [
            f"log_metric: {name} is {value} and is not kept"
            for name, value in metrics.items()
            if not math.isfinite(value)
        ]
        metrics = {name: value for name, value in metrics.items() if math.isfinite(value)}
        return {"extra": extra, "metrics": metrics, "misfits": misfits}


def _plain(value: Any) -> Any:
    """`value` as JSON can hold it: itself, the number in a NumPy or torch scalar, or its text."""
    if hasattr(value, "item") and not isinstance(value, dict):
        try:
            value = value.item()
        except (TypeError, ValueError, RuntimeError):
            return str(value)
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return str(value)
    return value


def checked(output: Any, count: int) -> tuple[list[float | None], dict[int, str]]:
    """Scores, None where the function does not apply or gave no number, and what is wrong with a row by its index.

    Raises Unusable if `output` is not one value for each of the `count` rows.
    """
    if isinstance(output, str | bytes | dict) or not hasattr(output, "__iter__"):
        raise Unusable(f"returned a {type(output).__name__}; it must return a list with one number for each completion")
    values = list(output)
    if len(values) != count:
        raise Unusable(f"returned {len(values)} values for {count} completions; it must return one for each")
    errors: dict[int, str] = {}
    scores: list[float | None] = []
    for row, value in enumerate(values):
        score = None if value is None else _number(value)
        if value is not None and score is None:
            errors[row] = f"returned {value!r:.{SHOWN}}; return a number, or None where it does not apply"
        elif score is not None and not math.isfinite(score):
            errors[row] = f"returned {value!r:.{SHOWN}}, which is not finite; return None where it does not apply"
        scores.append(None if row in errors else score)
    return scores, errors


def _number(value: Any) -> float | None:
    if isinstance(value, str | bytes):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf
    except (TypeError, ValueError):
        return None
