"""Reward functions, called as TRL's RLOOTrainer and GRPOTrainer call theirs."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rloo_pipeline.data.prompts import is_conversational
from rloo_pipeline.errors import UserError
from rloo_pipeline.progress import say
from rloo_pipeline.reward_config import FunctionReward
from rloo_pipeline.rewards.sources import load_callables
from rloo_pipeline.schema import RESERVED_COLUMNS

Arguments = dict[str, Any]
CALL_ARGUMENTS = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")


@dataclass(frozen=True)
class TrainerState:
    """What a reward function is told of the training: optimizer steps done before these completions were sampled."""

    global_step: int


def score_functions(
    configs: Sequence[FunctionReward], rows: pa.Table, root: Path, state: TrainerState
) -> dict[str, npt.NDArray[np.float64]]:
    """`scores_N` of each component by name, NaN where its function returned None.

    Async functions run concurrently. Raises UserError if a function cannot be loaded, raises, or returns anything but
    one finite number or None for each row.
    """
    functions = load_callables([str(config.function) for config in configs], root)
    for config in configs:
        _check_kwargs(config, rows)
    calls = [_Call(config, function, rows, state) for config, function in zip(configs, functions, strict=True)]
    # In a thread of its own, since a notebook's thread already runs an event loop.
    with ThreadPoolExecutor(1) as pool:
        outputs = pool.submit(asyncio.run, _run(calls)).result()
    return {call.config.name: call.checked(output) for call, output in zip(calls, outputs, strict=True)}


async def _run(calls: Sequence["_Call"]) -> list[Any]:
    started = [call.start() for call in calls]
    pending = [call.finish(output) for call, output in zip(calls, started, strict=True)]
    return await asyncio.gather(*pending)


def arguments(rows: pa.Table, state: TrainerState) -> Arguments:
    """Keyword arguments of a call on `rows`: TRL's, and every dataset column. The lists are the caller's own."""
    texts = rows["completion_text"].to_pylist()
    completions: list[Any] = texts
    if is_conversational(rows["prompt"]):
        completions = [[{"role": "assistant", "content": text}] for text in texts]
    return {
        "prompts": rows["prompt"].to_pylist(),
        "completions": completions,
        "completion_ids": rows["completion_token_ids"].to_pylist(),
        **{name: rows[name].to_pylist() for name in dataset_columns(rows)},
        "trainer_state": state,
    }


def dataset_columns(rows: pa.Table) -> list[str]:
    """The columns of `rows` that come from the dataset (prompt_id among them), without the prompt itself."""
    return [name for name in rows.column_names if name not in RESERVED_COLUMNS and name != "prompt"]


def _check_kwargs(config: FunctionReward, rows: pa.Table) -> None:
    for key in config.kwargs:
        if key in CALL_ARGUMENTS:
            raise UserError(f"reward {config.name}: kwargs: {key} is given to every reward function; use another name")
        if key in dataset_columns(rows):
            raise UserError(f"reward {config.name}: kwargs: {key} is a column of the dataset too; rename one")


@dataclass(frozen=True)
class _Call:
    config: FunctionReward
    function: Callable[..., Any]
    rows: pa.Table
    state: TrainerState

    def start(self) -> Any:
        try:
            return self._call(self.rows)
        except (Exception, SystemExit) as error:
            raise self._raised(error) from error

    async def finish(self, output: Any) -> Any:
        if not inspect.isawaitable(output):
            return output
        try:
            return await output
        except (Exception, SystemExit) as error:
            raise self._raised(error) from error

    def _call(self, rows: pa.Table) -> Any:
        logs = {"log_extra": self._log_extra, "log_metric": self._log_metric}
        return self.function(**arguments(rows, self.state), **logs, **self.config.kwargs)

    def _log_metric(self, name: str, value: float) -> None:
        say(f"reward {self.config.name}: {name} = {value}")

    def _log_extra(self, column: str, values: Sequence[Any]) -> None:
        say(f"reward {self.config.name}: log_extra: column {column} ({len(values)} values) is not stored")

    def _raised(self, error: BaseException) -> UserError:
        return UserError(
            f"{self._title()} raised {type(error).__name__}: {error} "
            f"({self._first_that_raises()}); mend the function. It is called with {', '.join(CALL_ARGUMENTS)} and the "
            "columns of the dataset as keyword arguments, so it needs **kwargs for those it does not name"
        )

    def _first_that_raises(self) -> str:
        for row in range(self.rows.num_rows):
            try:
                output = self._call(self.rows.slice(row, 1))
                if inspect.isawaitable(output):
                    _finish_alone(output)
            except (Exception, SystemExit):
                return f"at {self._place(row)}"
        return f"called on {self.rows.num_rows} rows from {self._place(0)} on; on no row alone"

    def _place(self, row: int) -> str:
        prompt_id, sample = self.rows["prompt_id"][row].as_py(), self.rows["sample_index"][row].as_py()
        return f"row {row + 1}, prompt_id {prompt_id}, sample_index {sample}"

    def checked(self, output: Any) -> npt.NDArray[np.float64]:
        """`scores_N`, float32 values held in float64, NaN for None; UserError for anything else."""
        values = self._listed(output)
        scores_N = np.array([self._number(value, row) for row, value in enumerate(values)], dtype=np.float64)
        with np.errstate(over="ignore"):
            scores_N = scores_N.astype(np.float32).astype(np.float64)
        applies_N = np.array([value is not None for value in values], dtype=bool)
        wrong = np.flatnonzero(applies_N & ~np.isfinite(scores_N))
        if wrong.size:
            row = int(wrong[0])
            raise UserError(
                f"{self._title()} returned {values[row]!r:.80} for {self._place(row)}, which is not finite in float32; "
                "return a finite number, or None where it does not apply"
            )
        return scores_N

    def _title(self) -> str:
        return f"reward {self.config.name}: {self.config.function}"

    def _listed(self, output: Any) -> list[Any]:
        try:
            values = list(output)
        except TypeError as error:
            raise UserError(
                f"{self._title()} returned a {type(output).__name__}; it must return a list with one number for each "
                "completion"
            ) from error
        if len(values) != self.rows.num_rows:
            raise UserError(
                f"{self._title()} returned {len(values)} values for {self.rows.num_rows} completions; it must return "
                "one for each"
            )
        return values

    def _number(self, value: Any, row: int) -> float:
        if value is None:
            return float("nan")
        try:
            if isinstance(value, str | bytes):
                raise TypeError
            return float(value)
        except OverflowError:
            return float("inf")
        except (TypeError, ValueError) as error:
            raise UserError(
                f"{self._title()} returned {value!r} for {self._place(row)}; return a number, or None where it does "
                "not apply"
            ) from error


def _finish_alone(output: Awaitable[Any]) -> Any:
    async def wait() -> Any:
        return await output

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, wait()).result()
