"""Bound the disk of a long run: weights and trainer states of most iterations leave the work tree and the DVC cache."""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rloo_pipeline import algorithms
from rloo_pipeline.cache import open_repo
from rloo_pipeline.config import load_params
from rloo_pipeline.disk import GIB
from rloo_pipeline.errors import UserError
from rloo_pipeline.layout import INITIAL, Layout
from rloo_pipeline.process import exclusive
from rloo_pipeline.prune_plan import Plan, Rule, make_plan

if TYPE_CHECKING:
    from dvc.repo import Repo
    from dvc.stage import Stage


def run(layout: Layout, rule: Rule, *, dry_run: bool) -> None:
    """Prune, and say what went and what can still be replayed; raises UserError while a stage or DVC runs."""
    params = load_params(layout.params)
    repo = open_repo(layout.root)
    with exclusive(layout, "prune"), _dvc_at_rest(repo):
        if algorithms.followed(layout.root):  # else a stage that a new package would run might seem up to date
            algorithms.refresh(layout.root)
        stages = _stages(repo)
        plan = make_plan(layout, params, repo, stages, rule)
        replay = replayable(stages, [path.resolve() for path in plan.folders])
        if not dry_run:
            remove(plan, layout.state / "pruned")
    show(plan, replay, dry_run)


@contextmanager
def _dvc_at_rest(repo: "Repo") -> Iterator[None]:
    from dvc.lock import LockError

    try:
        with repo.lock:
            yield
    except LockError as error:
        raise UserError(f"DVC is at work in this project, so nothing is pruned: {error}") from error


def _stages(repo: "Repo") -> "list[Stage]":
    from dvc.exceptions import DvcException

    try:
        return [stage for stage in repo.index.stages if hasattr(stage, "name")]
    except DvcException as error:
        raise UserError(f"{error}; `rloo clean` mends a dvc.lock that was cut short") from error


def remove(plan: Plan, trash: Path) -> None:
    """Remove folders and objects; killed at any moment, it leaves whole outputs or none, and a second run ends it."""
    shutil.rmtree(trash, ignore_errors=True)
    for index, folder in enumerate(plan.folders):
        trash.mkdir(parents=True, exist_ok=True)
        folder.rename(trash / str(index))
        if not any(folder.parent.iterdir()):
            folder.parent.rmdir()
    for path in plan.objects:
        path.unlink(missing_ok=True)
    shutil.rmtree(trash, ignore_errors=True)


def replayable(stages: Sequence["Stage"], gone: Sequence[Path]) -> dict[str, tuple[list[str], list[str]]]:
    """For each stage the iterations whose inputs and outputs are all there without `gone`, and the others."""
    found: dict[str, tuple[list[str], list[str]]] = {}
    for stage in stages:
        name, _, iteration = stage.name.partition("@")
        if iteration.isdigit():
            paths = [Path(item.fs_path) for item in (*stage.deps, *stage.outs)]
            there = all(path.exists() and path not in gone for path in paths)
            found.setdefault(name, ([], []))[0 if there else 1].append(iteration)
    return found


def ranges(iterations: Sequence[str]) -> str:
    """Ids in order, runs of consecutive ones as first-last; a dash for none."""
    runs: list[list[str]] = []
    for iteration in sorted(iterations):
        if runs and int(iteration) == int(runs[-1][-1]) + 1:
            runs[-1] = [runs[-1][0], iteration]
        else:
            runs.append([iteration])
    return ", ".join("-".join(run) for run in runs) or "-"


def show(plan: Plan, replay: Mapping[str, tuple[list[str], list[str]]], dry_run: bool) -> None:
    """Say what goes, what stays and why, and what can be replayed."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    reasons = {"initial": [INITIAL]}
    for iteration, reason in plan.kept.items():
        reasons.setdefault(reason, []).append(iteration)
    print(f"weights and trainer state {'would go' if dry_run else 'gone'}: {ranges(plan.dropped)}, {_size(plan.freed)}")
    print("kept: " + "; ".join(f"{ranges(iterations)} ({reason})" for reason, iterations in reasons.items()))
    for name, iterations in plan.held.items():
        print(f"still in the cache for {name}: files of {ranges(iterations)}; --all-revisions drops those too")
    if plan.outside:
        print("the DVC cache lies outside this project and may serve others: it is left as it is")
    print(f"disk of artifacts and DVC cache: {_size(plan.used)} before, {_size(plan.used - plan.freed)} after")
    table = Table(title="what `rloo verify` can still run", title_justify="left", box=SIMPLE_HEAD)
    for title in ("stage", "iterations", "inputs or outputs are gone"):
        table.add_column(title, overflow="fold")
    for stage, (possible, gone) in replay.items():
        table.add_row(stage, ranges(possible), ranges(gone))
    Console().print(table)
    if any(gone for _, gone in replay.values()):
        print(
            "`dvc repro --allow-missing` extends the chain; plain `dvc status` goes on listing what is gone, and\n"
            "plain `dvc repro` would make it again. What was pushed to a remote comes back with `dvc pull`."
        )


def _size(size: int) -> str:
    return f"{size / GIB:.2f} GiB" if size >= GIB / 10 else f"{size / 2**20:.2f} MiB"
