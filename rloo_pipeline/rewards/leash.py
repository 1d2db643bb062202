"""Starts the process that runs reward functions and kills all that it started when the stage is gone."""

import os
import signal
import sys
import threading
from pathlib import Path


def main(requests: int, replies: int) -> None:
    """Run the worker in a child; this process, small and idle, ends as the child does, with 128 + the signal if killed.

    The stage alone holds the other end of this process's standard input, and the kernel closes that however it ends:
    a worker busy in native code would not notice.
    """
    child = os.fork()
    if child == 0:
        _become_worker()
        from rloo_pipeline.rewards.worker import run

        run(requests, replies)
        return
    os.close(requests)
    os.close(replies)
    threading.Thread(target=_watch, daemon=True).start()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os._exit(code if code >= 0 else 128 - code)


def _watch() -> None:
    sys.stdin.buffer.read()
    os.killpg(0, signal.SIGKILL)


def _become_worker() -> None:
    """Make standard input empty, and send what user code prints to standard error."""
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
