"""An iteration of the work tree, or of a git revision: then its records from git, its artifacts from the DVC cache."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from rloo_pipeline.audit.artifacts import stages_of
from rloo_pipeline.cache import LOCK, files_of, git, object_path, open_repo, recorded
from rloo_pipeline.errors import UserError
from rloo_pipeline.layout import Layout, check_iteration

if TYPE_CHECKING:
    from dvc.repo import Repo

ROWS = ("rollouts", "rewards", "advantages")


@dataclass(frozen=True)
class Side:
    """One side of a comparison: `name` as the user wrote it, and a layout under which its files lie."""

    name: str
    iteration: str
    layout: Layout
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
        yield Side(spec, iteration, layout)
        return
    commit = git(layout.root, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}")
    if commit is None:
        raise UserError(f"{spec}: git knows no revision {revision!r}; write it as in HEAD~1:{iteration}")
    commit = commit.strip()
    lock = git(layout.root, "show", f"{commit}:./{LOCK}")
    if lock is None:
        raise UserError(f"{spec}: revision {revision} has no {LOCK}, so what it made is not known; commit that file")
    with TemporaryDirectory(prefix="rloo-diff-") as directory:
        side = Side(spec, iteration, Layout(Path(directory)), commit)
        _records(side, layout.root)
        _link(side, open_repo(layout.root), recorded(lock, f"{revision}:{LOCK}"))
        yield side


def _records(side: Side, root: Path) -> None:
    """Write the revision's provenance and metrics of the iteration, those that are in git."""
    for stage in stages_of(side.iteration):
        for place in (side.layout.provenance(stage, side.iteration), side.layout.metrics(stage, side.iteration)):
            text = git(root, "show", f"{side.commit}:./{place.relative_to(side.layout.root).as_posix()}")
            if text is not None:
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_text(text, encoding="utf-8")


def _link(side: Side, repo: "Repo", outputs: Mapping[str, str]) -> None:
    """Link the rows of the iteration; raises UserError if the cache lacks one."""
    for stage in ROWS:
        target = side.rows(stage)
        path = target.relative_to(side.layout.root).as_posix()
        if path not in outputs:
            continue
        files = files_of(repo, outputs[path])
        if files is None or not all(object_path(repo, md5).exists() for md5 in files.values()):
            raise UserError(
                f"{side.name}: {path} of that revision is not in the DVC cache; `dvc fetch --all-commits` brings it "
                "from the remote, if it was pushed"
            )
        for name, md5 in files.items():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            (target / name).symlink_to(object_path(repo, md5))
