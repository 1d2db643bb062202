"""What lies at a path, read and hashed once."""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pyarrow as pa
import pyarrow.compute as pc

from rloo_pipeline import fingerprint
from rloo_pipeline.data.images import read_images
from rloo_pipeline.errors import UserError
from rloo_pipeline.manifest import checked_fingerprint, read_manifest
from rloo_pipeline.shards import read_shard, read_table


@dataclass(frozen=True)
class Content:
    """status: missing if there is nothing, broken if it is not what its manifest says. counts: rows, step, ..."""

    status: Literal["ok", "missing", "broken"]
    fingerprint: str | None = None
    problem: str | None = None
    counts: Mapping[str, int] = field(default_factory=dict)


class Contents:
    """The contents of artifacts and of the user's own files, by path; each is read when it is first asked for."""

    def __init__(self) -> None:
        self._known: dict[Path, Content] = {}
        self._sources: dict[Path, Content] = {}

    def artifact(self, path: Path) -> Content:
        """An artifact with its fingerprint computed from its content, not taken from its manifest."""
        if path not in self._known:
            self._known[path] = _artifact(path)
        return self._known[path]

    def source(self, path: Path) -> Content:
        """A file or a directory of the user's own, or a reward model as a reward reads it: by its bytes."""
        if path not in self._sources:
            exists = path.exists()
            self._sources[path] = Content("ok", fingerprint.of_path(path)) if exists else Content("missing")
        return self._sources[path]


def _artifact(path: Path) -> Content:
    if not path.exists():
        return Content("missing")
    try:
        if path.is_file():
            table, content = read_table(path)
            return Content("ok", content, counts={"rows": table.num_rows})
        if "parts" in read_manifest(path):
            return Content("ok", checked_fingerprint(path), counts=_step(path / "state.json"))
        return _shards(path)
    except UserError as error:
        return Content("broken", problem=str(error))


def _shards(directory: Path) -> Content:
    manifest = read_manifest(directory)
    counts: Counter[str] = Counter()
    for index in range(len(manifest["shards"])):
        counts.update(_counts(read_shard(directory, manifest, index)))
    read_images(directory, manifest["facts"])
    # Each shard is what its entry says, and the manifest's fingerprint is that of its entries and facts.
    return Content("ok", manifest["fingerprint"], counts=dict(counts))


def _step(state: Path) -> dict[str, int]:
    """The optimizer's step from a trainer state whose files have been checked; nothing of a model."""
    return {"step": int(json.loads(state.read_text(encoding="utf-8"))["step"])} if state.exists() else {}


def _counts(table: pa.Table) -> dict[str, int]:
    counts = {"rows": table.num_rows}
    if "completion_token_ids" in table.column_names:
        counts["tokens"] = pc.sum(pc.list_value_length(table["completion_token_ids"])).as_py() or 0
    if "trained" in table.column_names:
        counts["trained"] = pc.sum(table["trained"]).as_py() or 0
    return counts
