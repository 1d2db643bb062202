"""The process of a stage: one at a time in a project, and never left behind when what started it dies."""

import fcntl
import json
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from rloo_pipeline.errors import Busy
from rloo_pipeline.layout import Layout
from rloo_pipeline.progress import say

if TYPE_CHECKING:
    import psutil

SECONDS_BETWEEN_LOOKS = 0.25
# A killed process keeps its lock until the kernel has torn it down, and one whose DVC was killed until it notices.
SECONDS_TO_DIE = 10.0
SHELLS = ("sh", "bash", "dash", "zsh", "fish")


@contextmanager
def exclusive(layout: Layout, what: str) -> Iterator[None]:
    """Hold the project's lock while a stage runs; raises Busy, a UserError, that names the one that holds it.

    Waits for one that is just being killed, so that a killed run can be started again at once.
    """
    with hold(layout.state / "lock", {"stage": what}, "in this project", SECONDS_TO_DIE):
        yield


@contextmanager
def hold(path: Path, holder: Mapping[str, str], where: str, patience_s: float = 0.0) -> Iterator[None]:
    """Hold the lock file at `path`, with `holder` and the process id written into it; raises Busy if another does.

    The kernel drops the lock with the process, so a killed stage blocks nobody.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+", encoding="utf-8") as file:
        if not _locked(file, patience_s):
            file.seek(0)
            other = file.read().strip() or "another stage"
            raise Busy(f"{other} runs {where}; wait for it or stop it, then run {holder['stage']} again")
        file.truncate(0)
        file.write(json.dumps({**holder, "pid": os.getpid()}))
        file.flush()
        yield


def _locked(file: TextIO, patience_s: float) -> bool:
    """Lock the file if it is free or becomes so in time; returns whether it is locked now."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.1)


def die_with_dvc() -> None:
    """Under DVC, watch the processes above this one and kill this one and its children when one of them is gone.

    DVC starts a stage through a shell; if DVC is killed the shell lives on, so a parent-death signal alone would
    not reach the stage.
    """
    if "DVC_STAGE" not in os.environ:
        return
    import psutil

    above = _above(psutil.Process())

    def watch() -> None:
        while all(process is not None and _lives(process) for process in above):
            time.sleep(SECONDS_BETWEEN_LOOKS)
        with suppress(OSError):
            say("DVC, which started this stage, is gone: the stage ends too")
        for child in psutil.Process().children(recursive=True):
            child.kill()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True, name="die-with-dvc").start()


def _lives(process: "psutil.Process") -> bool:
    """A killed process that its parent has not waited for is none: a container without an init keeps such for good."""
    import psutil

    with suppress(psutil.NoSuchProcess):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def _above(process: "psutil.Process") -> "list[psutil.Process | None]":
    """The parent and, if that is a shell, its parent too; None for one that died before it could be looked at.

    DVC's commands stay in its process group, while whatever adopts the orphan of a dead DVC is in another.
    """
    above: list[psutil.Process | None] = []
    for _ in range(2):
        parent = process.parent()
        if parent is None or _group(parent) != _group(process):
            return [*above, None]
        above.append(parent)
        if parent.name() not in SHELLS:
            break
        process = parent
    return above


def _group(process: "psutil.Process") -> int | None:
    try:
        return os.getpgid(process.pid)
    except ProcessLookupError:
        return None
