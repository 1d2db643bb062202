"""Progress of long parts: a bar in a terminal, plain lines in a log."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

SECONDS_BETWEEN_LINES = 5.0


class Progress(Protocol):
    """Something that is told of finished units."""

    def advance(self, units: int = 1) -> None: ...


class _Lines:
    def __init__(self, label: str, total: int, unit: str) -> None:
        self.label, self.total, self.unit = label, total, unit
        self.done, self.start, self.last = 0, time.monotonic(), time.monotonic()

    def advance(self, units: int = 1) -> None:
        self.done += units
        now = time.monotonic()
        if now - self.last >= SECONDS_BETWEEN_LINES or self.done >= self.total:
            self.last = now
            rate = self.done / max(now - self.start, 1e-9)
            say(f"{self.label}: {self.done}/{self.total} {self.unit} ({rate:.1f}/s)")


class _Bar:
    def __init__(self, bar: object, task: object) -> None:
        self.bar, self.task = bar, task

    def advance(self, units: int = 1) -> None:
        self.bar.advance(self.task, units)  # type: ignore[attr-defined]


def say(line: str) -> None:
    """One line to standard error, at once."""
    print(line, file=sys.stderr, flush=True)


@contextmanager
def progress(label: str, total: int, unit: str) -> Iterator[Progress]:
    """Count `total` units under `label`: a bar if standard error is a terminal, else a line every few seconds."""
    if not sys.stderr.isatty():
        yield _Lines(label, total, unit)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Rich

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Rich(*columns, console=Console(stderr=True)) as bar:
        yield _Bar(bar, bar.add_task(f"{label} ({unit})", total=total))
