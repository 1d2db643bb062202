"""The states of dvc.lock that a project knows: that of now and those in git."""

import hashlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from rloo_pipeline.files import write_json
from rloo_pipeline.layout import Layout
from rloo_pipeline.tracking.book import git, lock_hash, lock_outputs, parse_lock
from rloo_pipeline.tracking.outdated import read_json

MOST = 100  # revisions that are looked at, the latest first


@dataclass(frozen=True)
class Lock:
    """What tells a dvc.lock from others, and DVC's hashes of the metrics files that it names."""

    content: str  # lock_hash
    file: str  # SHA-256 of the bytes
    metrics: dict[str, str]


class Locks:
    """The locks of a project; one in git is parsed once and then kept in .rloo/locks.json, as parsing takes long."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._path = layout.state / "locks.json"
        self._kept = {blob: Lock(**row) for blob, row in read_json(self._path, "remove it").items()}

    def working(self) -> Lock | None:
        """The dvc.lock in the project's folder."""
        path = self._layout.root / "dvc.lock"
        return _lock_of(path.read_text(encoding="utf-8")) if path.exists() else None

    def at(self, revision: str) -> Lock | None:
        """The dvc.lock of a revision, None if it has none."""
        blob = (git(self._layout, "rev-parse", "--verify", "--quiet", f"{revision}:./dvc.lock") or "").strip()
        if not blob:
            return None
        if blob not in self._kept:
            self._kept[blob] = _lock_of(git(self._layout, "cat-file", "blob", blob) or "")
            write_json(self._path, {name: asdict(lock) for name, lock in self._kept.items()})
        return self._kept[blob]

    def committed(self) -> Iterator[tuple[str, Lock]]:
        """(revision, lock) of those that changed dvc.lock, the latest first."""
        log = git(self._layout, "log", "--all", f"--max-count={MOST}", "--format=%H", "--", "dvc.lock")
        for revision in (log or "").split():
            if lock := self.at(revision):
                yield revision, lock


def _lock_of(text: str) -> Lock:
    lock = parse_lock(text)
    metrics = {path: md5 for path, md5 in lock_outputs(lock).items() if path.startswith("metrics/")}
    return Lock(lock_hash(lock), hashlib.sha256(text.encode()).hexdigest(), metrics)
