"""DVC's own files, which it rewrites in place: killed at that moment it leaves them cut short and refuses to start."""

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from rloo_pipeline.errors import Busy
from rloo_pipeline.files import remove, write_whole
from rloo_pipeline.layout import Layout

LOCK, RWLOCK = Path("dvc.lock"), Path(".dvc/tmp/rwlock")


def back_up(layout: Layout) -> None:
    """Under DVC, which then waits for this stage and writes nothing, keep a copy of dvc.lock."""
    lock = layout.root / LOCK
    if "DVC_STAGE" in os.environ and lock.exists():
        write_whole(_copy(layout), lock.read_bytes())


def mend(layout: Layout, *, dry_run: bool) -> Iterator[str]:
    """Put the copy in the place of a broken dvc.lock, remove a broken rwlock; yields what is done.

    Raises Busy, a UserError, if DVC is at work on them.
    """
    if dry_run or not any(_broken(layout)):
        yield from (what for _, what in _broken(layout))
        return
    with _held_from_dvc(layout.root):
        for path, what in list(_broken(layout)):
            if path.name == LOCK.name and _copy(layout).exists():
                write_whole(path, _copy(layout).read_bytes(), layout.state)
            else:
                remove(path)
            yield what


def _broken(layout: Layout) -> Iterator[tuple[Path, str]]:
    lock, rwlock = layout.root / LOCK, layout.root / RWLOCK
    if lock.exists() and not _whole_lock(lock):
        instead = "as it was when the last stage began" if _copy(layout).exists() else "removed, there is no copy"
        yield lock, f"{LOCK}: cut short, {instead}; `dvc repro` takes finished stages from its cache"
    if rwlock.exists() and not _whole_json(rwlock):
        yield rwlock, f"{RWLOCK}: cut short, removed"


def _copy(layout: Layout) -> Path:
    return layout.state / LOCK.name


def _whole_lock(path: Path) -> bool:
    from dvc.schema import COMPILED_LOCKFILE_SCHEMA
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError
    from voluptuous import Invalid

    try:
        COMPILED_LOCKFILE_SCHEMA(YAML(typ="safe").load(path.read_text(encoding="utf-8")))
    except (YAMLError, UnicodeDecodeError, Invalid):
        return False
    return True


def _whole_json(path: Path) -> bool:
    try:
        json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return False
    return True


@contextmanager
def _held_from_dvc(root: Path) -> Iterator[None]:
    """DVC's own locks, so that a file is not taken for broken which DVC is writing just now."""
    from dvc.lock import LockError, make_lock

    folder = root / RWLOCK.parent
    with ExitStack() as stack:
        try:
            for name in ("lock", "rwlock.lock"):
                stack.enter_context(make_lock(str(folder / name), tmp_dir=str(folder)))
        except LockError as error:
            raise Busy(f"DVC runs in {root.resolve()}; wait for it or stop it, then run clean again") from error
        yield
