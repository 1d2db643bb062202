"""Whether a run fits on the disk, and what is told when the disk refuses."""

import errno
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rloo_pipeline.errors import UserError
from rloo_pipeline.layout import Layout
from rloo_pipeline.progress import say

BYTES_PER_PARAMETER = 12  # float32 weights and AdamW's two float32 moments
GIB, MIB = 2**30, 2**20
ROOM = "make room (`rloo prune`, `dvc gc`)"
REFUSALS = {
    errno.ENOSPC: ("the disk is full", ROOM),
    errno.EDQUOT: ("your quota of the disk is used up", ROOM),
    errno.EROFS: ("the file system is read-only", "mount it for writing, or work in a copy of the project"),
    errno.EACCES: ("permission denied", "give yourself the right to read and write there"),
    errno.EPERM: ("not permitted", "look at the owner and the attributes of the file"),
    errno.EXDEV: ("artifacts/ and .rloo/ are on two file systems", "put them on one: artifacts are renamed into place"),
    errno.EIO: ("the disk fails (input/output error)", "look at the system's log"),
}
FULL = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def refusals_told(path: Path) -> Iterator[None]:
    """Turn a refusal of the disk (full, read-only, no permission) into a UserError with the file and the remedy.

    path: what is being written, for errors that do not name their file.
    """
    try:
        yield
    except Exception as error:
        number = _number(error)
        if number is None or number not in REFUSALS:
            raise
        where = Path(getattr(error, "filename", None) or path)
        what, remedy = REFUSALS[number]
        free = f" ({_free(where) / MIB:.1f} MiB free)" if number in FULL else ""
        raise UserError(f"{where}: {what}{free}; {remedy}, then run the command again") from error


def _number(error: Exception) -> int | None:
    """The system's number of an error; safetensors and shutil put it into their text alone."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    if not isinstance(error, shutil.Error) and type(error).__name__ != "SafetensorError":
        return None
    found = re.search(r"(?:\[Errno |\(os error )(\d+)", str(error))
    return int(found[1]) if found else None


def _free(path: Path) -> int:
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def parameters(model: Path) -> int:
    """Number of parameters stored in the safetensors files of a model."""
    from safetensors import safe_open

    count = 0
    for path in model.glob("*.safetensors"):
        with safe_open(path, framework="np") as file:
            for name in file.keys():  # noqa: SIM118 (not a mapping)
                size = 1
                for length in file.get_slice(name).get_shape():
                    size *= length
                count += size
    return count


def check_space(layout: Layout, model: Path, iterations: int) -> None:
    """Raise UserError if the checkpoints of `iterations` more iterations will not fit.

    Files are linked between work tree and DVC cache, so each checkpoint counts once.
    """
    needed = iterations * parameters(model) * BYTES_PER_PARAMETER
    free = shutil.disk_usage(layout.root).free
    if needed > free:
        raise UserError(
            f"{iterations} iterations will write {needed / GIB:.1f} GiB of checkpoints (weights and optimizer, "
            f"{needed / max(iterations, 1) / GIB:.2f} GiB each), but {layout.root.resolve()} has {free / GIB:.1f} GiB "
            "free; make room or shorten the chain with `rloo iterations N`"
        )
    say(f"disk: {iterations} iterations will write about {needed / GIB:.1f} GiB, {free / GIB:.1f} GiB are free")
