"""An iteration of the work tree, or of a git revision: then its records from git, its artifacts from the DVC cache."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from rloo_pipeline.audit.artifacts import outputs, stages_of
from rloo_pipeline.cache import LOCK, files_of, git, object_path, open_repo, recorded
from rloo_pipeline.config import Params, load_params
from rloo_pipeline.errors import UserError
from rloo_pipeline.layout import Layout, check_iteration

if TYPE_CHECKING:
    from dvc.repo import Repo

ROWS = ("rollouts", "rewards", "advantages")


@dataclass(frozen=True)
class Side:
    """One side of a comparison: `name` as the user wrote it, and a layout under which its files lie.

    params: None where this version of the package cannot read those of the revision.
    """

    name: str
    iteration: str
    layout: Layout
    params: Params | None
    commit: str | None = None

    def rows(self, stage: str) -> Path:
        """The directory of a stage's rows."""
        return self.layout.artifacts / stage / self.iteration


@contextmanager
def open_side(spec: str, layout: Layout) -> Iterator[Side]:
    """The side that `[REVISION:]ITERATION` names; raises UserError if it is not in git or not in the DVC cache.

    Nothing is checked out: the revision's files are laid out in a temporary directory, artifacts as links into the
    cache.
    """
    revision, _, iteration = spec.rpartition(":")
    check_iteration(iteration)
    if not revision:
        yield Side(spec, iteration, layout, load_params(layout.params))
        return
    commit = git(layout.root, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}")
    if commit is None and git(layout.root, "rev-parse", "--git-dir") is None:
        raise UserError(f"{spec}: {layout.root.resolve()} is in no git repository; a revision needs one (`git init`)")
    if commit is None:
        raise UserError(f"{spec}: git knows no revision {revision!r}; write it as in HEAD~1:{iteration}")
    commit = commit.strip()
    lock = git(layout.root, "show", f"{commit}:./{LOCK}")
    if lock is None:
        raise UserError(f"{spec}: revision {revision} has no {LOCK}, so what it made is not known; commit that file")
    with TemporaryDirectory(prefix="rloo-diff-") as directory:
        there = Layout(Path(directory))
        _records(there, layout, commit, iteration)
        side = Side(spec, iteration, there, _params(there), commit)
        _link(side, open_repo(layout.root), recorded(lock, f"{revision}:{LOCK}"))
        yield side


def _records(there: Layout, here: Layout, commit: str, iteration: str) -> None:
    """Write the revision's params, and provenance and metrics of the iteration, those that are in git."""
    records = [place(stage, iteration) for stage in stages_of(iteration) for place in (there.provenance, there.metrics)]
    for place in (there.params, *records):
        text = git(here.root, "show", f"{commit}:./{place.relative_to(there.root).as_posix()}")
        if text is not None:
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(text, encoding="utf-8")
    for stage in stages_of(iteration):
        kept = there.kept_provenance(stage, iteration)
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.symlink_to(here.kept_provenance(stage, iteration).resolve())


def _params(there: Layout) -> Params | None:
    try:
        return load_params(there.params)
    except UserError:
        return None


def _link(side: Side, repo: "Repo", recorded: Mapping[str, str]) -> None:
    """Link what the cache has of the iteration's outputs; raises UserError if it lacks rows."""
    stages = stages_of(side.iteration)
    places = [place for stage in stages for place in outputs(side.layout, stage, side.iteration).values()]
    needed = [side.rows(stage) for stage in ROWS]
    for target in dict.fromkeys(side.layout.prompts if place.suffix else place for place in places):
        path = target.relative_to(side.layout.root).as_posix()
        if path not in recorded:
            continue
        objects = {name: object_path(repo, md5) for name, md5 in (files_of(repo, recorded[path]) or {}).items()}
        there = {name: content for name, content in objects.items() if content.exists()}
        if target in needed and (not objects or there != objects):
            raise UserError(
                f"{side.name}: {path} of that revision is not in the DVC cache; `dvc fetch --all-commits` brings it "
                "from the remote, if it was pushed"
            )
        for name, content in there.items():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            (target / name).symlink_to(content)
