"""Reward functions, called as TRL's trainers call theirs, in processes that can be killed."""

import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa

from rloo_pipeline.config import ExecutionConfig
from rloo_pipeline.errors import UserError
from rloo_pipeline.progress import progress, say
from rloo_pipeline.reward_config import FunctionReward
from rloo_pipeline.rewards.call import TrainerState, dataset_columns
from rloo_pipeline.rewards.frames import Message
from rloo_pipeline.rewards.scored import Score, Scored, applies_to, spread, summed
from rloo_pipeline.rewards.worker_process import Call, Functions, WorkerProcess
from rloo_pipeline.schema import CALL_ARGUMENTS

GIVEN = ("prompt", "completion_text", "completion_token_ids")


@contextmanager
def open_functions(
    configs: Sequence[FunctionReward], root: Path, state: TrainerState, execution: ExecutionConfig
) -> Iterator[Score]:
    """What scores completions joined with their prompts: rows -> Scored of each component by name.

    One process loads the functions once. Async ones run at the same time, and beside the sync ones, which run one
    after another. One that fails on a batch (raises, hangs, ends its process, returns no list of one value for each
    row) is called again row by row, in processes side by side; its rows' errors say why. Raises UserError if a
    function cannot be loaded, and if one with on_error: fail fails on a batch but on no row alone.
    """
    functions = Functions(configs, root, state.global_step)
    worker = WorkerProcess(functions)
    try:
        yield _Scorer(functions, worker, execution.reward_workers or os.cpu_count() or 1).score
        worker.close()
    finally:
        worker.kill()


class _Scorer:
    def __init__(self, functions: Functions, worker: WorkerProcess, workers: int) -> None:
        self.functions, self.worker, self.workers = functions, worker, workers
        self.said: set[str] = set()

    def score(self, rows: pa.Table) -> dict[str, Scored]:
        configs = self.functions.configs
        for config in configs:
            _check_kwargs(config, rows)
        calls = [Call(number, applies_to(config, rows)) for number, config in enumerate(configs)]
        rows = rows.select([*GIVEN, *dataset_columns(rows)])
        replies = self._together([call for call in calls if call.rows is None or call.rows], rows)
        scored = {}
        for call, config in zip(calls, configs, strict=True):
            count = rows.num_rows if call.rows is None else len(call.rows)
            reply = replies.get(call.function)
            if reply is None:
                found = Scored(np.empty(0))
            elif "failed" in reply:
                given = rows if call.rows is None else rows.take(call.rows)
                found = self._row_by_row(call.function, given, reply["reason"])
            else:
                found = self._read(config, [reply], count)
            scored[config.name] = spread(found, call.rows, rows.num_rows)
        return scored

    def _together(self, calls: Sequence[Call], rows: pa.Table) -> dict[int, Message]:
        """The reply of each function; what one that fails stops is done again without it."""
        if not calls:
            return {}
        replies, crash = self.worker.call(calls, rows)
        if crash is None:
            return replies
        left = [call for call in calls if call.function not in replies]
        suspects = [call for call in left if call.function in crash.during] or left
        others = [call for call in left if call not in suspects]
        if len(suspects) == 1:
            number = suspects[0].function
            reason = f"{self.functions.configs[number].function} {crash.reason}"
            replies[number] = {"failed": number, "reason": reason}
        else:
            for group in self._apart(suspects):
                replies |= self._together(group, rows)
        return replies | self._together(others, rows)

    def _apart(self, calls: Sequence[Call]) -> list[list[Call]]:
        """Groups to find the culprit by: the sync function against the async ones, which may wait for each other."""
        sync = [call for call in calls if not self.worker.is_async[call.function]]
        asynchronous = [call for call in calls if call not in sync]
        if sync and asynchronous:
            return [*([call] for call in sync), asynchronous]
        return [[call] for call in calls]

    def _row_by_row(self, number: int, rows: pa.Table, reason: str) -> Scored:
        """Scores of the rows each alone; with on_error: fail, up to the first one with an error."""
        config = self.functions.configs[number]
        stop = config.on_error == "fail"
        say(f"reward {config.name}: {reason} (on {rows.num_rows} rows together); called row by row now")
        left, replies = deque(range(rows.num_rows)), dict[int, Message]()

        def drain(worker: WorkerProcess) -> None:
            while left:
                try:
                    row = left.popleft()
                except IndexError:  # another thread has just taken the last one
                    return
                replies[row] = self._alone(worker, number, rows.slice(row, 1))
                done.advance()
                if stop and _error(replies[row]) is not None:
                    left.clear()

        with ExitStack() as stack:
            done = stack.enter_context(progress(f"reward {config.name}, row by row", rows.num_rows, "rows"))
            more = min(self.workers, rows.num_rows) - 1
            workers = [self.worker, *(WorkerProcess(self.functions) for _ in range(more))]
            for worker in workers[1:]:
                stack.callback(worker.kill)
            pool = stack.enter_context(ThreadPoolExecutor(len(workers)))
            try:
                for future in [pool.submit(drain, worker) for worker in workers]:
                    future.result()
            except BaseException:
                left.clear()
                for worker in workers:
                    worker.stop()
                raise
        return self._of_rows(config, replies, rows.num_rows, reason)

    def _alone(self, worker: WorkerProcess, number: int, row: pa.Table) -> Message:
        replies, crash = worker.call([Call(number)], row)
        if crash is None:
            return replies[number]
        return {"failed": number, "reason": f"{self.functions.configs[number].function} {crash.reason}"}

    def _of_rows(self, config: FunctionReward, replies: dict[int, Message], count: int, reason: str) -> Scored:
        errors = {row: error for row, reply in sorted(replies.items()) if (error := _error(reply)) is not None}
        if not errors:
            problem = f"reward {config.name}: {reason} on {count} rows together, but on none of them alone"
            if config.on_error == "fail":
                raise UserError(
                    f"{problem}; mend the function (or raise its time_limit, or lower rollouts.prompts_per_shard). "
                    "With on_error: invalid the scores of the single rows are taken"
                )
            self._say_once(f"{problem}: the scores of the single rows are taken")
        nothing: Message = {"scores": [None], "errors": {}, "extra": {}, "metrics": {}, "misfits": []}
        usable = [replies.get(row, nothing) for row in range(count)]
        scored = self._read(config, [nothing if "failed" in reply else reply for reply in usable], 1)
        return Scored(scored.scores_N, errors, scored.extra, scored.logged)

    def _read(self, config: FunctionReward, replies: Sequence[Message], count: int) -> Scored:
        """Replies one after another, each about `count` rows."""
        scores: list[float | None] = []
        errors: dict[int, str] = {}
        extra: dict[int, dict[str, object]] = {}
        for start, reply in zip(range(0, len(replies) * count, count), replies, strict=True):
            scores += reply["scores"]
            errors |= {start + int(row): reason for row, reason in reply["errors"].items()}
            for column, values in reply["extra"].items():
                for row, value in enumerate(values, start):
                    extra.setdefault(row, {})[column] = value
            for misfit in reply["misfits"]:
                self._say_once(f"reward {config.name}: {misfit}")
        logged = [{name: (value * count, count) for name, value in reply["metrics"].items()} for reply in replies]
        return Scored(np.array(scores, np.float64), errors, extra, summed(logged))

    def _say_once(self, line: str) -> None:
        if line not in self.said:
            self.said.add(line)
            say(line)


def _error(reply: Message) -> str | None:
    """What is wrong with the only row of a reply."""
    reason: str | None = reply["reason"] if "failed" in reply else reply["errors"].get("0")
    return reason


def _check_kwargs(config: FunctionReward, rows: pa.Table) -> None:
    for key in config.kwargs:
        if key in CALL_ARGUMENTS:
            raise UserError(f"reward {config.name}: kwargs: {key} is given to every reward function; use another name")
        if key in dataset_columns(rows):
            raise UserError(f"reward {config.name}: kwargs: {key} is a column of the dataset too; rename one")
