"""Files that are whole or absent: written to a temporary place, flushed, renamed last."""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_json(path: Path, value: Mapping[str, Any] | list[Any]) -> None:
    """Write JSON with sorted keys, atomically; NaN and infinity are refused (ValueError)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    text = json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n"
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def publish(work: Path, final: Path) -> None:
    """Put the finished directory `work` in the place of `final`, by rename.

    Files of an older `final` may be hard links into the DVC cache: they are unlinked, never written to.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    retired = work.with_name(f"{work.name}.retired")
    shutil.rmtree(retired, ignore_errors=True)
    if final.exists():
        final.rename(retired)
    work.rename(final)
    shutil.rmtree(retired, ignore_errors=True)
