"""A process that runs reward functions, as the stage sees it: calls with a time limit, and a kill that reaches all."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from rloo_pipeline.errors import UserError
from rloo_pipeline.reward_config import FunctionReward
from rloo_pipeline.rewards.frames import Message, TimeIsUp, receive, send

SECONDS_TO_LOAD = 600.0  # importing what the functions need, models of their own among it
SECONDS_TO_START = 600.0  # from a request to the start of a call, while no other call is under way
SECONDS_TO_END = 5.0
# Modules are found where this process finds them, whatever lies in the working directory.
START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[3]); from rloo_pipeline.rewards.leash import main; "
    "main(int(sys.argv[1]), int(sys.argv[2]))"
)


@dataclass(frozen=True)
class Functions:
    """What a worker loads: the functions of one stage run, by number."""

    configs: Sequence[FunctionReward]
    root: Path
    global_step: int


@dataclass(frozen=True)
class Call:
    """A function by its number, and the rows that it gets; None for all."""

    function: int
    rows: Sequence[int] | None = None


@dataclass(frozen=True)
class Crash:
    """What stopped a worker, and the functions that were being called then."""

    reason: str
    during: Sequence[int]


class WorkerProcess:
    """Starts at the first call, and again at the next one after it was killed or ended."""

    def __init__(self, functions: Functions) -> None:
        self.functions = functions
        self.process: subprocess.Popen[bytes] | None = None
        self.is_async: list[bool] = []

    def call(self, calls: Sequence[Call], rows: pa.Table) -> tuple[dict[int, Message], Crash | None]:
        """The replies of the functions that finished, by number, and what stopped the others, if anything did.

        The time limit of each counts from its own start. Raises UserError if a function cannot be loaded.
        """
        self.start()
        replies: dict[int, Message] = {}
        deadlines: dict[int, float] = {}
        try:
            send(self.requests, {"calls": [{"function": call.function, "rows": call.rows} for call in calls]}, rows)
            while len(replies) < len(calls):
                to_start = time.monotonic() + SECONDS_TO_START
                message, _ = receive(self.replies, min(deadlines.values(), default=to_start))
                if "started" in message:
                    number = message["started"]
                    deadlines[number] = time.monotonic() + self.functions.configs[number].time_limit
                else:
                    number = message["finished"] if "finished" in message else message["failed"]
                    replies[number] = message
                    del deadlines[number]
        except TimeIsUp:
            self.kill()
            if not deadlines:
                problem = f"could not be called for {SECONDS_TO_START:g} s: something that a call left running is in"
                return replies, Crash(f"{problem} the way", [])
            late = min(deadlines, key=lambda number: deadlines[number])
            limit = self.functions.configs[late].time_limit
            return replies, Crash(f"took longer than {limit:g} s and was stopped", list(deadlines))
        except (EOFError, OSError):
            return replies, Crash(f"ended its process ({self._ended()})", list(deadlines))
        return replies, None

    def start(self) -> None:
        """Start the process and load the functions, unless it runs; raises UserError if one cannot be loaded."""
        if self.process is not None and self.process.poll() is not None:
            self.kill()  # it ended between two calls
        if self.process is not None:
            return
        self._open()
        functions = self.functions
        hello = {
            "specs": [config.function for config in functions.configs],
            "kwargs": [config.model_dump(mode="json")["kwargs"] for config in functions.configs],
            "root": str(functions.root),
            "global_step": functions.global_step,
        }
        specs = ", ".join(dict.fromkeys(config.function for config in functions.configs))
        try:
            send(self.requests, hello)
            message, _ = receive(self.replies, time.monotonic() + SECONDS_TO_LOAD)
        except TimeIsUp as error:
            self.kill()
            raise UserError(
                f"rewards: {specs} took longer than {SECONDS_TO_LOAD:g} s to import; do slow work in the call"
            ) from error
        except (EOFError, OSError) as error:
            raise UserError(f"rewards: the process ended ({self._ended()}) while it imported {specs}") from error
        if "refused" in message:
            self.close()
            raise UserError(message["refused"])
        self.is_async = message["loaded"]

    def _open(self) -> None:
        theirs, self.requests = os.pipe()
        self.replies, back = os.pipe()
        arguments = [str(theirs), str(back), json.dumps([str(path) for path in sys.path])]
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-c", START, *arguments],
                stdin=subprocess.PIPE,
                pass_fds=(theirs, back),
                process_group=0,
            )
        finally:
            os.close(theirs)
            os.close(back)

    def close(self) -> None:
        """Let the process end as it would by itself, so that what user code registered for its end runs; else kill."""
        if self.process is None:
            return
        os.close(self.requests)
        self.requests = -1
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(SECONDS_TO_END)
        self.kill()

    def stop(self) -> None:
        """Kill the worker and all that it started, another thread's call with it: the leash sees its input end."""
        process = self.process
        if process is not None and process.stdin is not None:
            process.stdin.close()

    def kill(self) -> None:
        """End the process and all that it started, if it runs."""
        if self.process is None:
            return
        self.stop()
        self.process.wait()
        for descriptor in (self.requests, self.replies):
            if descriptor >= 0:
                os.close(descriptor)
        self.process = None

    def _ended(self) -> str:
        """How the process ended."""
        process = self.process
        assert process is not None
        try:
            code = process.wait(SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            code = None
        self.kill()
        if code is None:
            return "it closed its pipes"
        if code > 128 and code - 128 in set(signal.Signals):
            return f"signal {signal.Signals(code - 128).name}" + (", as for want of memory" if code == 137 else "")
        return f"exit status {code}"
