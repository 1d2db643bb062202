"""What a check finds, told line by line."""

from collections import Counter
from collections.abc import Callable
from typing import Literal, ParamSpec, TypeVar

from rloo_pipeline.disk import GIB, MIB
from rloo_pipeline.errors import UserError

Level = Literal["ok", "warning", "error"]
P = ParamSpec("P")
T = TypeVar("T")


class Report:
    """Prints each finding at once: how bad it is, where, and what to do."""

    def __init__(self) -> None:
        self.counts: Counter[Level] = Counter()

    def tell(self, level: Level, where: str, text: str) -> None:
        """One finding; further lines of the text are indented below it."""
        self.counts[level] += 1
        lines = text.splitlines() or [""]
        print(f"{level:<8} {where}: {lines[0]}", flush=True)
        for line in lines[1:]:
            print(f"         {line}", flush=True)

    def ok(self, where: str, text: str) -> None:
        """Nothing to do."""
        self.tell("ok", where, text)

    def warning(self, where: str, text: str) -> None:
        """It may run, but not as wished."""
        self.tell("warning", where, text)

    def error(self, where: str, text: str) -> None:
        """It will not run."""
        self.tell("error", where, text)

    def attempt(self, where: str, make: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """What `make` returns; a UserError of it becomes an error, and None is returned."""
        try:
            return make(*args, **kwargs)
        except UserError as error:
            self.error(where, str(error))
            return None

    def conclude(self) -> int:
        """Print the counts; returns the exit status, 2 if there was an error."""
        errors, warnings = self.counts["error"], self.counts["warning"]
        print(f"{_count(errors, 'error')}, {_count(warnings, 'warning')}")
        return 2 if errors else 0


def size(count: int) -> str:
    """A number of bytes as people read it."""
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / MIB:.1f} MiB"


def _count(number: int, what: str) -> str:
    return f"{number or 'no'} {what}{'' if number == 1 else 's'}"
