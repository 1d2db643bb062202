"""How a command ended, told in a file to what started it: DVC turns every failure of a stage into one exit status."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from rloo_pipeline.errors import Busy, UserError
from rloo_pipeline.files import write_json

VARIABLE = "RLOO_OUTCOME"  # names the file; without it nothing is told
CAN_PASS = ("out of memory", "Free memory on device", "Engine core initialization failed")

Kind = Literal["done", "killed", "passing", "user", "error"]


@contextmanager
def told() -> Iterator[None]:
    """Write {"kind", "message"} when the body ends; "killed" stands there until then, and stays if it never ends."""
    if VARIABLE not in os.environ:
        yield
        return
    path = Path(os.environ[VARIABLE])
    _write(path, "killed", "")
    try:
        yield
    except SystemExit as ended:
        _write(path, "user" if ended.code else "done", "")
        raise
    except Exception as error:
        _write(path, kind(error), str(error))
        raise
    _write(path, "done", "")


def kind(error: Exception) -> Kind:
    """passing: the same command can succeed later; user: the user must mend something; error: neither is known."""
    if isinstance(error, Busy | ConnectionError | TimeoutError | MemoryError):
        return "passing"
    if any(text in str(error) for text in CAN_PASS):
        return "passing"
    return "user" if isinstance(error, UserError) else "error"


def _write(path: Path, kind: Kind, message: str) -> None:
    write_json(path, {"kind": kind, "message": message})
