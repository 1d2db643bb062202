"""MLflow shows what the files say: `track` makes a run equal to them, as often as it is called."""

from collections.abc import Callable
from dataclasses import dataclass

from rloo_pipeline.config import Params
from rloo_pipeline.layout import Layout
from rloo_pipeline.progress import say
from rloo_pipeline.tracking.book import Run, agreeing, lock_outputs, present, read_lock, read_runs, write_runs, writing
from rloo_pipeline.tracking.files import read_contents
from rloo_pipeline.tracking.store import address, connected, reason, told

AFTER = ("update", "evaluate")  # the stages that end an iteration


@dataclass(frozen=True)
class Tracked:
    """What a call of `track` did."""

    run_id: str
    new_run: bool
    new_points: int
    not_finite: tuple[str, ...]


def track(layout: Layout, params: Params, *, copy_models: bool = False, stage_ends: bool = False) -> Tracked:
    """Make the project's MLflow run equal to its files; raises whatever MLflow raises if it cannot be reached.

    stage_ends: whether dvc.lock lacks the stage that is just ending, so that its hash says nothing yet.
    """
    from rloo_pipeline.tracking.projection import create_run, fill, find_run

    with writing(layout), connected(layout) as store:
        lock, runs = read_lock(layout), read_runs(layout)
        contents = read_contents(layout, params, lock)
        found = find_run(store, layout, runs, contents)
        new_run = found is None
        run, stored, held = found or create_run(store, layout, contents)
        if run not in runs:
            runs.append(run)
            write_runs(layout, runs)  # before anything can fail: the next call goes on with this run
        whole = not stage_ends and agreeing({**run.metrics, **contents.hashes}, lock_outputs(lock))
        run.add(present(layout, lock if whole else None))
        points = fill(store, layout, (run, stored, held), contents, lock_outputs(lock), copy=copy_models)
        write_runs(layout, [*(other for other in runs if other is not run), run])
    return Tracked(run.run_id, new_run, points, contents.not_finite)


def in_passing(layout: Layout, params: Params, *, stage_ends: bool = False, tell: Callable[[str], None] = say) -> None:
    """Track unless params say not to; whatever goes wrong is told in one line and is made up for by `rloo track`."""
    if not params.execution.tracking:
        return
    try:
        done = track(layout, params, stage_ends=stage_ends)
    except Exception as error:  # the stage is done and its artifacts stand: nothing here may make it fail
        tell(f"mlflow: {address(layout)} took nothing ({reason(error)}); `rloo track` makes up for it")
        return
    for text in done.not_finite:
        tell(f"mlflow: not a finite number, so told in the tag rloo.not_finite alone: {text}")


def track_now(layout: Layout, params: Params, *, copy_models: bool) -> Tracked:
    """Track when a person asks for it; raises UserError if the store cannot be reached."""
    with told(layout):
        return track(layout, params, copy_models=copy_models)


def note_moment(layout: Layout) -> None:
    """Note for the current run which flow run and revision led to the present dvc.lock; MLflow is not asked.

    Nothing is noted before anything was tracked, and where dvc.lock names other results than the run's.
    """
    with writing(layout):
        lock, runs = read_lock(layout), read_runs(layout)
        run = next((run for run in reversed(runs) if run.store == address(layout)), None)
        if run is not None and agreeing(run.metrics, lock_outputs(lock)):
            run.add(present(layout, lock))
            write_runs(layout, runs)


def _current(layout: Layout) -> Run | None:
    return next((run for run in reversed(read_runs(layout)) if run.store == address(layout)), None)


def run_id(layout: Layout) -> str | None:
    """The id of the project's MLflow run, None before anything was tracked."""
    run = _current(layout)
    return run.run_id if run else None


def run_url(layout: Layout) -> str | None:
    """Where a browser finds the run; None without a server: `mlflow ui` then shows the project's database."""
    run = _current(layout)
    if run is None or not run.store.startswith("http"):
        return None
    return f"{run.store.rstrip('/')}/#/experiments/{run.experiment_id}/runs/{run.run_id}"
