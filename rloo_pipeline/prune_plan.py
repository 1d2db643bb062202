"""What a prune may remove: policies that nothing needs any more, and their objects that nothing else shares."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISDIR
from typing import TYPE_CHECKING

from rloo_pipeline.cache import files_of, object_path, other_revisions, recorded_here
from rloo_pipeline.config import Params
from rloo_pipeline.layout import INITIAL, Layout

if TYPE_CHECKING:
    from dvc.repo import Repo
    from dvc.stage import Stage


@dataclass(frozen=True)
class Rule:
    """What the user asked for. all_revisions: objects that other branches, tags or experiments hold go too."""

    keep_last: int
    keep_every: int | None = None
    all_revisions: bool = False


@dataclass(frozen=True)
class Plan:
    """Folders of the work tree and objects of the cache that go (folders' listings last), and bytes of disk.

    kept: why each finished iteration stays. dropped: the iterations that lose something.
    held: the revisions that keep objects of dropped iterations, with these.
    outside: the cache is not the project's own, so that no object goes.
    """

    kept: dict[str, str]
    dropped: list[str]
    folders: list[Path]
    objects: list[Path]
    held: dict[str, list[str]]
    outside: bool
    freed: int
    used: int


def make_plan(layout: Layout, params: Params, repo: "Repo", stages: Sequence["Stage"], rule: Rule) -> Plan:
    """Decide from params.yaml, dvc.lock, what DVC would still run, and the other revisions."""
    outputs = recorded_here(layout.root)
    here = Layout()  # paths as dvc.yaml spells them
    parts = {it: [path.as_posix() for path in (here.model(it), here.trainer_state(it))] for it in params.iterations}
    finished = [iteration for iteration, paths in parts.items() if all(path in outputs for path in paths)]
    kept = choose(params, finished, rule, _still_needed(stages, parts))
    going = {iteration: parts[iteration] for iteration in finished if iteration not in kept}
    present = {it: [layout.root / path for path in paths if (layout.root / path).exists()]
               for it, paths in going.items()}  # fmt: skip
    folders = [path for paths in present.values() for path in paths]

    outside = not Path(repo.cache.local.path).is_relative_to(Path(repo.root_dir))
    hashes, held = _unshared(repo, outputs, going, {} if rule.all_revisions else dict(other_revisions(layout.root)))
    objects = [] if outside else [object_path(repo, md5) for md5 in _listings_last(hashes)]
    removed = [*objects, *(file for folder in folders for file in folder.rglob("*"))]
    return Plan(
        kept=kept,
        dropped=[it for it in going if present[it] or (hashes[it] and not outside)],
        folders=folders,
        objects=objects,
        held=held,
        outside=outside,
        freed=disk_bytes(removed, last_links=True),
        used=disk_bytes([*layout.artifacts.rglob("*"), *Path(repo.cache.local.path).rglob("*")]),
    )


def choose(params: Params, finished: Sequence[str], rule: Rule, needed: Mapping[str, str]) -> dict[str, str]:
    """The finished iterations that stay, each with the reason.

    needed: policies that a stage which is not up to date reads, with that stage's name.
    """
    kept = {}
    reference = params.iterations[finished[-1]].reference if finished else INITIAL
    for index, iteration in enumerate(finished):
        if index >= len(finished) - rule.keep_last:
            kept[iteration] = f"the last {rule.keep_last}"
        elif rule.keep_every is not None and int(iteration) % rule.keep_every == 0:
            kept[iteration] = f"every {rule.keep_every}"
        elif iteration == reference:
            kept[iteration] = "the reference"
        elif iteration in needed:
            kept[iteration] = f"{needed[iteration]} is not up to date and reads it"
    return kept


def _still_needed(stages: Sequence["Stage"], parts: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """The iterations whose policy or state a stage reads that `dvc repro --allow-missing` would run."""
    owners = {path: iteration for iteration, paths in parts.items() for path in paths}
    needed: dict[str, str] = {}
    for stage in stages:
        mine = [owners[dep.def_path] for dep in stage.deps if dep.def_path in owners]
        if any(iteration not in needed for iteration in mine) and stage.changed(allow_missing=True):
            needed |= dict.fromkeys(mine, stage.name)
    return needed


def _unshared(
    repo: "Repo",
    outputs: Mapping[str, str],
    going: Mapping[str, Sequence[str]],
    revisions: Mapping[str, Mapping[str, str]],
) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Hashes of each iteration's objects that no other output and no revision has; the revisions that hold others."""
    paths = {path for those in going.values() for path in those}
    staying = _objects(repo, (md5 for path, md5 in outputs.items() if path not in paths))
    theirs = {name: _objects(repo, set(outs.values())) for name, outs in revisions.items()}
    everywhere = staying.union(*theirs.values())
    objects: dict[str, list[str]] = {}
    held: dict[str, list[str]] = {}
    for iteration, those in going.items():
        mine = {md5 for md5 in _objects(repo, [outputs[path] for path in those]) if object_path(repo, md5).exists()}
        objects[iteration] = sorted(mine - everywhere)
        for name in theirs:
            if theirs[name] & mine - staying:
                held.setdefault(name, []).append(iteration)
    return objects, held


def _objects(repo: "Repo", hashes: Iterable[str]) -> set[str]:
    """All objects of outputs: a folder's listing and its files."""
    found = set()
    for md5 in hashes:
        found |= {md5, *(files_of(repo, md5) or {}).values()}
    return found


def _listings_last(objects: Mapping[str, Iterable[str]]) -> list[str]:
    """All hashes once. A folder's files are found by its listing, so a prune that was killed needs it to go on."""
    unique = {md5 for hashes in objects.values() for md5 in hashes}
    return sorted(unique, key=lambda md5: (md5.endswith(".dir"), md5))


def disk_bytes(paths: Iterable[Path], *, last_links: bool = False) -> int:
    """Bytes of disk that files take, one with several names counted once; folders count nothing.

    last_links: count only files of which these are all the names, so what is freed when they go.
    """
    names: Counter[tuple[int, int]] = Counter()
    files = {}
    for path in paths:
        status = path.lstat()
        if not S_ISDIR(status.st_mode):
            key = (status.st_dev, status.st_ino)
            names[key] += 1
            files[key] = status
    counted = [status for key, status in files.items() if not last_links or names[key] == status.st_nlink]
    return sum(status.st_blocks * 512 for status in counted)
