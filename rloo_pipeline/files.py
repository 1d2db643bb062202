"""Files that are whole or absent: written to a temporary place, flushed to the disk, renamed last."""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rloo_pipeline.disk import refusals_told


def write_json(path: Path, value: Mapping[str, Any] | list[Any], staging: Path | None = None) -> None:
    """Write JSON with sorted keys, atomically; NaN and infinity are refused (ValueError).

    staging: where the temporary file stands if not beside `path`, for folders that DVC looks at as a whole.
    """
    text = json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n"
    write_whole(path, text.encode(), staging)


def write_whole(path: Path, content: bytes, staging: Path | None = None) -> None:
    """Write a file atomically, flushed to the disk; raises UserError, and leaves nothing, if the disk refuses."""
    with refusals_told(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        if staging is not None:
            staging.mkdir(parents=True, exist_ok=True)
        temporary = (staging or path.parent) / f".{path.name}.tmp"
        try:
            with temporary.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise


def publish(outputs: Mapping[Path, Path]) -> None:
    """Put finished files and directories in the places of older ones (from work to final), by rename.

    Every older directory goes away before anything new comes, and the new comes in the order given: at no moment
    stands an artifact of one run beside a record of another. Everything is on the disk before the first rename.
    Files of an older artifact may be hard links into the DVC cache: they are unlinked, never written to.
    """
    for work, final in outputs.items():
        sync(work)
        final.parent.mkdir(parents=True, exist_ok=True)
    retired = [_retire(work, final) for work, final in outputs.items() if final.is_dir()]
    for work, final in outputs.items():
        work.replace(final)
        _flush(final.parent)
    for path in retired:
        remove(path)


def _retire(work: Path, final: Path) -> Path:
    retired = work.with_name(f"{work.name}.retired")
    remove(retired)
    final.rename(retired)
    _flush(final.parent)
    return retired


def remove(path: Path) -> None:
    """Remove a file or a directory with all below it, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Flush a file, or all that lies below a directory, to the disk: a rename alone survives a power cut empty."""
    if path.is_dir():
        for item in path.iterdir():
            sync(item)
    _flush(path)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
