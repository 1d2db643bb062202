"""The process of a stage: one at a time in a project, and never left behind when what started it dies."""

import fcntl
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rloo_pipeline.errors import UserError
from rloo_pipeline.layout import Layout

SECONDS_BETWEEN_LOOKS = 1.0


@contextmanager
def exclusive(layout: Layout, what: str) -> Iterator[None]:
    """Hold the project's lock while a stage runs; raises UserError that names the one that holds it.

    The kernel drops the lock with the process, so a killed stage blocks nobody.
    """
    layout.state.mkdir(parents=True, exist_ok=True)
    with (layout.state / "lock").open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            holder = file.read().strip() or "another stage"
            raise UserError(f"{holder} runs in this project; wait for it or stop it, then run {what} again") from error
        file.truncate(0)
        file.write(json.dumps({"stage": what, "pid": os.getpid()}))
        file.flush()
        yield


def die_with_dvc() -> None:
    """Under DVC, watch the processes above this one and kill this one and its children when one of them is gone.

    DVC starts a stage through a shell; if DVC is killed the shell lives on, so a parent-death signal alone would
    not reach the stage.
    """
    if "DVC_STAGE" not in os.environ:
        return
    import psutil

    above = [psutil.Process().parent()]
    if above[0] is not None and above[0].name() in ("sh", "bash", "dash", "zsh"):
        above.append(above[0].parent())

    def watch() -> None:
        while all(process is not None and process.is_running() for process in above):
            time.sleep(SECONDS_BETWEEN_LOOKS)
        for child in psutil.Process().children(recursive=True):
            child.kill()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True, name="die-with-dvc").start()
