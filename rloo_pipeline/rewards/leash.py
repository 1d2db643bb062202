"""Starts the process that runs reward functions, and kills it and all that it started when the stage is gone."""

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
LOOKS, SECONDS_BETWEEN_LOOKS = 500, 0.01


def main(requests: int, replies: int) -> None:
    """Run the worker in a child with a process group of its own; this small process watches and ends as the child does.

    The stage alone holds the other end of this process's standard input, and the kernel closes that however it ends:
    a worker busy in native code would not notice. The exit status is 128 + the signal if one killed the child.
    """
    with contextlib.suppress(OSError, AttributeError):  # so that the worker's orphans become children of this process
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    child = os.fork()
    if child == 0:
        _become_worker()
        from rloo_pipeline.rewards.worker import run

        run(requests, replies)
        return
    with contextlib.suppress(OSError):
        os.setpgid(child, child)  # here too, so that it is done before the group is killed
    os.close(requests)
    os.close(replies)

    def kill() -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)

    def watch() -> None:
        sys.stdin.buffer.read()
        kill()

    threading.Thread(target=watch, daemon=True).start()
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    kill()  # what the child left behind; before it is reaped, so that its number cannot be another's
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    _kill_orphans()
    os._exit(code if code >= 0 else 128 - code)


def _kill_orphans() -> None:
    """Kill what the worker started in process groups and sessions of its own."""
    with contextlib.suppress(ChildProcessError):  # none is left
        for _ in range(LOOKS):
            reaped, _ = os.waitpid(-1, os.WNOHANG)
            if not reaped:
                _kill_descendants()
                time.sleep(SECONDS_BETWEEN_LOOKS)


def _kill_descendants() -> None:
    import psutil

    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            process.kill()


def _become_worker() -> None:
    """Make standard input empty, and send what user code prints to standard error."""
    os.setpgid(0, 0)
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
