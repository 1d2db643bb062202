"""What runs reward functions in the process that worker_process.py starts."""

import asyncio
import inspect
import threading
import traceback
from collections.abc import Callable
from typing import Any

import pyarrow as pa

from rloo_pipeline.errors import UserError
from rloo_pipeline.rewards.call import (
    Arguments,
    Logs,
    TrainerState,
    Unusable,
    arguments,
    checked,
    is_async,
    ready,
    told,
)
from rloo_pipeline.rewards.frames import Message, receive, send


def run(requests: int, replies: int) -> None:
    """Load the functions of the first request, then make the calls of each further one, until there are no more.

    requests, replies: descriptors of pipes. Every call tells when it starts and how it ends.
    """
    Worker(requests, replies).serve()


class Worker:
    """The functions of one stage run; sync ones run in the main thread, async ones in one loop beside it."""

    def __init__(self, requests: int, replies: int) -> None:
        self.requests, self.replies = requests, replies
        self.writing = threading.Lock()
        self.complained: set[int] = set()

    def serve(self) -> None:
        message, _ = receive(self.requests)
        try:
            self._load(message)
        except UserError as error:
            self._tell({"refused": str(error)})
            return
        self._tell({"loaded": [is_async(function) for function, _ in self.functions]})
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True, name="async-rewards").start()
        while True:
            try:
                message, rows = receive(self.requests)
            except EOFError:
                return
            self._make_calls(message["calls"], rows)

    def _load(self, message: Message) -> None:
        from rloo_pipeline.rewards.sources import load_callables

        self.state = TrainerState(message["global_step"])
        self.specs: list[str] = message["specs"]
        found = load_callables(self.specs, message["root"])
        self.functions = [ready(*item) for item in zip(self.specs, found, message["kwargs"], strict=True)]

    def _make_calls(self, calls: list[Message], rows: pa.Table) -> None:
        prepared = [(call["function"], rows if call["rows"] is None else rows.take(call["rows"])) for call in calls]
        running = [
            asyncio.run_coroutine_threadsafe(self._call_async(number, given), self.loop)
            for number, given in prepared
            if is_async(self.functions[number][0])
        ]
        for number, given in prepared:
            if not is_async(self.functions[number][0]):
                self._call(number, given)
        for future in running:
            future.result()

    def _call(self, number: int, rows: pa.Table) -> None:
        call, logs = self._bound(number, rows)
        self._tell({"started": number})
        try:
            output = call()
            if inspect.isawaitable(output):
                output = asyncio.run_coroutine_threadsafe(_awaited(output), self.loop).result()
            self._finished(number, rows, output, logs)
        except BaseException as error:
            self._failed(number, error)

    async def _call_async(self, number: int, rows: pa.Table) -> None:
        call, logs = self._bound(number, rows)
        self._tell({"started": number})
        try:
            self._finished(number, rows, await call(), logs)
        except BaseException as error:
            self._failed(number, error)

    def _bound(self, number: int, rows: pa.Table) -> tuple[Callable[[], Any], Logs]:
        function, kwargs = self.functions[number]
        logs = Logs()
        given: Arguments = arguments(rows, self.state)
        given |= {"log_extra": logs.log_extra, "log_metric": logs.log_metric, **kwargs}
        return lambda: function(**given), logs

    def _finished(self, number: int, rows: pa.Table, output: Any, logs: Logs) -> None:
        scores, errors = checked(output, rows.num_rows)
        reasons = {str(row): f"{self.specs[number]} {reason}" for row, reason in errors.items()}
        self._tell({"finished": number, "scores": scores, "errors": reasons, **logs.told(rows.num_rows)})

    def _failed(self, number: int, error: BaseException) -> None:
        if isinstance(error, Unusable):
            reason = str(error)
        else:
            reason = f"raised {told(error)}"
            if number not in self.complained:  # once is enough to find the line
                traceback.print_exception(error, limit=-5)
            self.complained.add(number)
        self._tell({"failed": number, "reason": f"{self.specs[number]} {reason}"})

    def _tell(self, message: Message) -> None:
        with self.writing:
            send(self.replies, message)


async def _awaited(output: Any) -> Any:
    return await output
