"""The flow rloo-training: a run's stages under Prefect, or without any server by `python -m flows.training`."""

import os
import sys
from pathlib import Path
from typing import Annotated, Any
from uuid import UUID

import httpx
import typer
from prefect import flow, get_run_logger, task
from prefect.artifacts import create_link_artifact, create_markdown_artifact, create_table_artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.exceptions import TerminationSignal
from prefect.runtime import flow_run
from prefect.settings import PREFECT_API_URL
from prefect.states import Cancelled, Completed
from prefect.tasks import Task
from prefect.transactions import CommitMode, transaction

from flows import artifacts, chain, dvc, node, settings
from rloo_pipeline import gpu
from rloo_pipeline.config import load_params
from rloo_pipeline.errors import Busy, UserError
from rloo_pipeline.layout import Layout

SECONDS_BETWEEN_TRIES = [10, 60, 300]
SECONDS_FOR_A_SERVER = 120
LOCAL = "local"
RUN_ID = "RLOO_PREFECT_FLOW_RUN_ID"  # tells the stages which flow run they belong to

# DVC alone decides what is skipped.
NO_MEMORY: dict[str, Any] = {"cache_policy": NO_CACHE, "persist_result": False}


def can_pass(_task: Task[..., Any], _run: TaskRun, state: State[Any]) -> bool:
    """Whether a failed task is worth another try: a server that is away comes back, a user's error stays."""
    error = state.result(raise_on_failure=False)
    return isinstance(error, dvc.CanPass | Busy) or any(
        isinstance(each, httpx.TransportError) for each in (error, getattr(error, "__cause__", None))
    )


TRIES: dict[str, Any] = {
    "retries": len(SECONDS_BETWEEN_TRIES),
    "retry_delay_seconds": SECONDS_BETWEEN_TRIES,
    "retry_condition_fn": can_pass,
    **NO_MEMORY,
}


@flow(name="rloo-training", persist_result=False)
def training(
    iterations: int | None = None,
    extend_by: int = 0,
    overrides: dict[str, Any] | None = None,
    target: str = LOCAL,
    project: str = ".",
    allow_missing: bool = False,
) -> State[None]:
    """Run every stage of the chain in params.yaml that DVC finds changed, iteration by iteration.

    Args:
        iterations: How many iterations the chain shall have; nothing leaves the chain as it is.
        extend_by: How many iterations to add. A chain that is not finished is finished instead.
        overrides: Values to write into params.yaml, by dotted path, as in {"advantages.beta": 0.02}.
        target: local, or the name of a DVC remote that the artifacts are pushed to at the end.
        project: The project's folder.
        allow_missing: As in `dvc repro --allow-missing`, finished stages may lack their artifacts.
    """
    cancelled = node.end_with_worker()
    node.end_lost(UUID(flow_run.id))
    os.environ[RUN_ID] = str(flow_run.id)
    try:
        run_chain(project, overrides or {}, iterations, extend_by, target, allow_missing)
    except TerminationSignal:
        if not cancelled.is_set():  # the worker's, which sets the state itself
            raise
        return Cancelled()
    finally:
        _note_end(project)
    return Completed()


def _note_end(project: str) -> None:
    """Let `rloo find` know which dvc.lock this run ended with, however it ended."""
    from rloo_pipeline.tracking import note_moment

    try:
        note_moment(Layout(Path(project)))
    except Exception as error:  # it must not hide how the run ended
        get_run_logger().warning("the end of this run is not noted for `rloo find`: %s", error)


def run_chain(
    project: str,
    overrides: dict[str, Any],
    iterations: int | None,
    extend_by: int,
    target: str,
    allow_missing: bool,
) -> None:
    """The flow's tasks and subflows in order."""
    params_task(project, overrides, iterations, extend_by, target)
    for name in chain.before_status(Path(project)):
        run_stage(project, name, allow_missing)
    opening, unfinished = status_task(project, allow_missing)
    for name in opening:
        run_stage(project, name, allow_missing)
    for iteration in unfinished:
        # Called in a task, since a retry of this flow run would otherwise take a finished subflow for the next one.
        iteration_task.with_options(task_run_name=f"iteration {iteration}")(project, iteration, allow_missing)
    if not unfinished:
        run_stage(project, chain.LAST, allow_missing)
    if target != LOCAL:
        push_task(project, target)


@flow(name="rloo-iteration", flow_run_name="iteration {iteration}", persist_result=False)
def one_iteration(project: str, iteration: str, allow_missing: bool) -> None:
    """Run the stages of one iteration and show what came out."""
    for name in chain.of_iteration(iteration):
        run_stage(project, name, allow_missing)
    shown = show_task(project, iteration, return_state=True)
    if not shown.is_completed():  # the iteration stands without its artifacts
        get_run_logger().warning("iteration %s is done, but not shown: %s", iteration, shown.message)


def run_stage(project: str, name: str, allow_missing: bool) -> None:
    """Run one DVC stage as a task that is named as the stage."""
    stage_task.with_options(name=name.partition("@")[0], task_run_name=name)(project, name, allow_missing)


@task(name="stage", **TRIES)
def stage_task(project: str, name: str, allow_missing: bool) -> State[None]:
    """Run one DVC stage alone, its lines in this task's log while it runs."""

    def repro() -> bool:
        return dvc.repro(Path(project), name, _log, allow_missing=allow_missing)

    if name.partition("@")[0].removesuffix("_initial") in gpu.STAGES:
        _log(f"waits for its turn: {', '.join(node.limits())}")
        with node.slot():
            ran = repro()
    else:
        ran = repro()
    return Completed() if ran else Completed(name="Unchanged", message="DVC found nothing to run")


@task(name="iteration", **NO_MEMORY)
def iteration_task(project: str, iteration: str, allow_missing: bool) -> None:
    """Run one iteration as a subflow."""
    # A finished stage stays finished if a later one fails: Prefect shall not roll it back.
    with transaction(commit_mode=CommitMode.EAGER):
        one_iteration(project, iteration, allow_missing)


@task(name="params", task_run_name="params", **TRIES)
def params_task(project: str, overrides: dict[str, Any], iterations: int | None, extend_by: int, target: str) -> None:
    """Write the run's settings into params.yaml; first see that the target is there, before hours of training."""
    if target != LOCAL:
        dvc.check_remote(Path(project), target)
    settings.change(Layout(Path(project)), overrides, iterations, extend_by, _log)


@task(name="status", task_run_name="status", **TRIES)
def status_task(project: str, allow_missing: bool) -> tuple[list[str], list[str]]:
    """Ask DVC which opening stages and iterations have something to run."""
    root = Path(project)
    opening, unfinished = chain.to_run(root, load_params(Layout(root).params), allow_missing=allow_missing)
    _log(f"something to run in: {', '.join([*opening, *unfinished]) or 'nothing'}")
    return opening, unfinished


@task(name="show", task_run_name="show", **TRIES)
def show_task(project: str, iteration: str) -> None:
    """Make the iteration's artifacts: figures, groups, a link to the MLflow run, which learns of dvc.lock here."""
    from rloo_pipeline.tracking import in_passing, run_url

    layout = Layout(Path(project))
    params = load_params(layout.params)
    in_passing(layout, params, tell=_log)
    if url := run_url(layout):
        create_link_artifact(url, "The MLflow run", key=f"mlflow-{iteration}")
    table = artifacts.figures(layout, params, iteration)
    create_table_artifact(table, key=f"iteration-{iteration}", description=f"Figures of iteration {iteration}")
    # Last, since it fails for an iteration whose rollouts were removed.
    text = artifacts.groups(layout.root, iteration)
    create_markdown_artifact(text, key=f"groups-{iteration}", description=f"Groups of iteration {iteration}")


@task(name="push", task_run_name="push", **TRIES)
def push_task(project: str, remote: str) -> None:
    """Push the artifacts to a DVC remote."""
    dvc.push(Path(project), remote, _log)


def _log(line: str) -> None:
    get_run_logger().info("%s", line)


def plainly(
    iterations: int | None, extend_by: int, overrides: dict[str, Any], target: str, project: str, allow_missing: bool
) -> None:
    """The same run without any server: its lines to standard error, and no second tries."""
    from rloo_pipeline.tracking import in_passing

    root = Path(project)

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    def run(stages: list[str]) -> None:
        for name in stages:
            dvc.repro(root, name, say, allow_missing=allow_missing)

    if target != LOCAL:
        dvc.check_remote(root, target)
    params = settings.change(Layout(root), overrides, iterations, extend_by, say)
    run(chain.before_status(root))
    opening, unfinished = chain.to_run(root, params, allow_missing=allow_missing)
    run(opening)
    for iteration in unfinished:
        run(chain.of_iteration(iteration))
        in_passing(Layout(root), params, tell=say)
    if not unfinished:
        run([chain.LAST])
    if target != LOCAL:
        dvc.push(root, target, say)


def main(
    iterations: Annotated[int | None, typer.Option(help="How many iterations the chain shall have.")] = None,
    extend_by: Annotated[int, typer.Option(help="How many to add; an unfinished chain is finished instead.")] = 0,
    set_: Annotated[list[str] | None, typer.Option("--set", help="For params.yaml: advantages.beta=0.1")] = None,
    target: Annotated[str, typer.Option(help="local, or a DVC remote to push to at the end.")] = LOCAL,
    project: Annotated[str, typer.Option(help="The project's folder.")] = ".",
    allow_missing: Annotated[bool, typer.Option(help="As in `dvc repro --allow-missing`.")] = False,
) -> None:
    """Train in this process: as a flow run if PREFECT_API_URL names a server, without any server otherwise."""
    try:
        arguments = (iterations, extend_by, settings.parse(set_ or []), target, project, allow_missing)
        if PREFECT_API_URL.value():
            node.wait_for_server(SECONDS_FOR_A_SERVER)
            training(*arguments)
        else:
            plainly(*arguments)
    except (UserError, dvc.Failed) as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(2 if isinstance(error, UserError) else 1) from error


if __name__ == "__main__":
    typer.run(main)
