"""DVC commands for flows: their lines as they come, why they failed, and nothing left behind."""

import json
import os
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rloo_pipeline import outcome
from rloo_pipeline.errors import UserError

LEASH = Path(__file__).with_name("leash.py")
SECONDS_TO_DIE = 5.0
LINES_IN_A_MESSAGE = 5
LOCKED = ("Unable to acquire lock", "it is being blocked by")
HINTS = ("To track the changes with git", "\tgit add", "To enable auto staging", "\tdvc config", "Use `dvc push`")
KILLED = 128  # exit statuses above tell the signal

Say = Callable[[str], None]


class Failed(Exception):
    """A DVC command failed and would fail again."""


class CanPass(Failed):
    """A DVC command failed for a reason that can pass: the same command can succeed later."""


def repro(root: Path, stage: str, say: Say, *, allow_missing: bool = False) -> bool:
    """`dvc repro` of one stage alone, each line of output given to `say` as it comes; returns whether the stage ran.

    Raises Failed with the stage's own message, CanPass if trying again can help.
    """
    flags = ["--allow-missing"] if allow_missing else []
    with tempfile.TemporaryDirectory(prefix="rloo-") as folder:
        told = Path(folder) / "outcome.json"
        code, lines = _run(root, ["repro", "--single-item", *flags, stage], say, {outcome.VARIABLE: str(told)})
        ended = json.loads(told.read_text(encoding="utf-8")) if told.exists() else None
    if code:
        raise _failure(stage, code, lines, ended)
    return ended is not None


def changed(root: Path, *, allow_missing: bool = False) -> set[str]:
    """Names of the stages that `dvc repro` would run now, those that their results would change in turn left out.

    allow_missing: a dependency or output that is not there counts as unchanged.
    """
    code, lines = _run(root, ["status", "--json"], lambda line: None, {})
    if code:
        raise _failure("status", code, lines, None)
    stages = json.loads(next((line for line in reversed(lines) if line.startswith("{")), "{}"))
    return {stage for stage, entries in stages.items() if not (allow_missing and _only_missing(entries))}


def check_remote(root: Path, remote: str) -> None:
    """Raises UserError if the project has no DVC remote of this name."""
    code, lines = _run(root, ["remote", "list"], lambda line: None, {})
    if code:
        raise _failure("remote list", code, lines, None)
    known = [line.split()[0] for line in lines]
    if remote not in known:
        names = ", ".join(known) or "none"
        raise UserError(f"target {remote}: no such DVC remote; there are: {names}; `dvc remote add` makes one")


def push(root: Path, remote: str, say: Say) -> None:
    """`dvc push` to a remote; raises CanPass if it fails, since networks come back."""
    code, lines = _run(root, ["push", "--remote", remote], say, {})
    if code:
        raise CanPass(f"dvc push to {remote} failed with status {code}:\n" + _end(lines))


def _only_missing(entries: list[Any]) -> bool:
    states = [
        state
        for entry in entries
        if isinstance(entry, dict)
        for change in entry.values()
        for state in (change.values() if isinstance(change, dict) else [change])
    ]
    return all(state == "deleted" for state in states)


def _failure(stage: str, code: int, lines: list[str], ended: dict[str, str] | None) -> Failed:
    """What to raise: `ended` is how the stage's own process ended, None if it never began."""
    message = f"{stage} failed with status {code}:\n{_end(lines)}"
    if ended is None:
        busy = any(text in line for line in lines for text in LOCKED)
        return CanPass(message) if busy or KILLED < code < 255 else Failed(message)
    if ended["message"]:
        message = f"{stage}: {ended['message']}"
    return CanPass(message) if ended["kind"] in ("passing", "killed") else Failed(message)


def _end(lines: list[str]) -> str:
    return "\n".join(lines[-LINES_IN_A_MESSAGE:])


def _run(root: Path, arguments: list[str], say: Say, extra: dict[str, str]) -> tuple[int, list[str]]:
    """Run DVC in `root` and say its lines; returns its exit status and the last lines."""
    last: deque[str] = deque(maxlen=200)
    with _leashed(root, [sys.executable, "-m", "dvc", *arguments], extra) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if (line := line.rstrip()) and not line.startswith(HINTS):
                last.append(line)
                say(line)
    return process.returncode, list(last)


@contextmanager
def _leashed(root: Path, command: list[str], extra: dict[str, str]) -> Iterator["subprocess.Popen[str]"]:
    """A process whose group dies when this block is left, or when this process dies in whatever way."""
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", str(LEASH), *command],
        cwd=root,
        env=_environment() | extra,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
        start_new_session=True,  # Ctrl-C reaches this process alone, which then ends the block
    )
    try:
        yield process
    except BaseException:
        assert process.stdin is not None
        process.stdin.close()
        raise
    finally:
        try:
            process.wait(timeout=SECONDS_TO_DIE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _environment() -> dict[str, str]:
    """This process's, with its interpreter's scripts first on the path, so that `rloo` is found without activation."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    return {**os.environ, "PATH": path, "DVC_NO_ANALYTICS": "true", "PYTHONUNBUFFERED": "1"}
