"""What killed runs leave behind: which of it no next run will use, and removing it."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rloo_pipeline.config import Params
from rloo_pipeline.dvc_files import mend
from rloo_pipeline.files import remove
from rloo_pipeline.layout import INITIAL, Layout, note_of
from rloo_pipeline.process import exclusive
from rloo_pipeline.stages.context import algorithm_version, library_versions

RESUMED = ("rollouts", "logprobs", "rewards", "advantages", "evaluate")  # the others start over
FOLDERS = ("artifacts", "metrics", "timings", "provenance", "sources", "reports")


@dataclass(frozen=True)
class Leftover:
    """A file or directory that can go, and why."""

    path: Path
    reason: str

    @property
    def size(self) -> int:
        """The bytes that its removal frees; a file linked into the DVC cache frees none."""
        files = [self.path, *self.path.rglob("*")] if self.path.is_dir() else [self.path]
        stats = [file.lstat() for file in files if not file.is_dir()]
        return sum(stat.st_size for stat in stats if stat.st_nlink == 1)


def clean(layout: Layout, params: Params, *, everything: bool, dry_run: bool) -> None:
    """Remove leftovers, mend what a killed DVC left, and say so; `everything`: what a next run could go on from too.

    Raises Busy, a UserError, while a stage runs.
    """
    with exclusive(layout, "clean"):
        for line in mend(layout, dry_run=dry_run):
            print(line)
        found = sorted(find(layout, params, everything=everything), key=lambda item: item.path)
        total = sum(item.size for item in found)
        for item in found:
            print(f"{item.path.relative_to(layout.root)}: {item.reason}, {item.size} bytes")
            if not dry_run:
                remove(item.path)
    verb = "would be removed" if dry_run else "removed"
    print(f"{len(found)} {verb}, {total} bytes")


def find(layout: Layout, params: Params, *, everything: bool) -> Iterator[Leftover]:
    """The leftovers among the work in progress, and temporary files elsewhere in the project.

    The caller holds the project's lock, so no verify and no prune is at work on theirs.
    """
    for path in layout.state.glob("work/*/*/*"):
        reason = "partial output" if everything else why_useless(path, layout, params)
        if reason:
            yield Leftover(path, reason)
    for path in layout.state.glob("verify-*"):
        yield Leftover(path, "artifacts that a killed verify replayed")
    if (layout.state / "pruned").exists():
        yield Leftover(layout.state / "pruned", "what a killed prune had set aside")
    temporary = [layout.root / ".params.yaml.tmp", *layout.state.glob(".*.tmp")]
    for folder in FOLDERS:
        temporary += (layout.root / folder).rglob(".*.tmp")
    for path in temporary:
        if path.is_file():
            yield Leftover(path, "half-written file")


def why_useless(path: Path, layout: Layout, params: Params) -> str | None:
    """Why no next run will use an entry of the work in progress; None if one could, or if that cannot be told."""
    stage, iteration = path.parent.parent.name, path.parent.name
    key = path.name.split(".")[0]
    if path.name.endswith(".retired"):
        return "replaced artifact"
    if path.name.endswith((".tmp", ".records")):
        return "half-written records"
    if stage not in RESUMED:
        return f"{stage} starts over"
    if iteration not in (INITIAL, *params.iterations):
        return f"params.yaml has no iteration {iteration}"
    note = note_of(path.with_name(key))
    if not note.exists():
        return None
    return _outdated(json.loads(note.read_text(encoding="utf-8")), stage, params)


def _outdated(made_by: dict[str, Any], stage: str, params: Params) -> str | None:
    now = {"algorithm": algorithm_version(stage), "seed": params.seed, "versions": library_versions()}
    sections = params.model_dump(mode="json")
    for name, value in now.items():
        if made_by[name] != value:
            return f"made under another {name}"
    for name, value in made_by["settings"].items():
        if name == "sampling":  # that part of evaluate which the samples depend on
            outdated = any(sections["evaluate"].get(key) != item for key, item in value.items())
        else:
            outdated = name in sections and sections[name] != value
        if outdated:
            return f"made under other settings of {name}"
    return None
