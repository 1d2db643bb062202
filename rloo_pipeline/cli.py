"""The command line: one command for each stage here, those for people in commands/."""

import gc
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Annotated

import typer

from rloo_pipeline import outcome
from rloo_pipeline.commands import audit, project, tracking
from rloo_pipeline.config import Params, load_params
from rloo_pipeline.disk import refusals_told
from rloo_pipeline.errors import UserError
from rloo_pipeline.layout import INITIAL, Layout

app = typer.Typer(
    help="RLOO on language models in replayable stages.", no_args_is_help=True, pretty_exceptions_enable=False
)
app.add_typer(audit.app)
app.add_typer(project.app)
app.add_typer(tracking.app)
Iteration = Annotated[str, typer.Argument(help="Four-digit id of the iteration, as in 0001.")]

ENVIRONMENT = {
    "DO_NOT_TRACK": "1",
    # Waiting threads give the core away soon: as fast on an idle machine, far faster on a shared one.
    "GOMP_SPINCOUNT": "3000",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}


def main() -> None:
    """Entry point: user errors are told without a traceback, with exit status 2."""
    # Importing torch and transformers makes millions of objects that stay: looking through them again and again
    # is a quarter of the import.
    gc.set_threshold(100_000, 50, 100)
    for key, value in ENVIRONMENT.items():
        os.environ.setdefault(key, value)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a locale without some character shows its number
            stream.reconfigure(errors="backslashreplace")
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")  # a log gets plain lines; libraries' bars would fill it
    try:
        with outcome.told(), refusals_told(Path.cwd()):
            app()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


@contextmanager
def _stage(name: str, *, offline: bool) -> Iterator[tuple[Layout, Params]]:
    """What surrounds every stage: checked params, the locks, threads and the network as they should be."""
    from rloo_pipeline import gpu
    from rloo_pipeline.dvc_files import back_up
    from rloo_pipeline.process import die_with_dvc, exclusive
    from rloo_pipeline.sources import check_listed

    die_with_dvc()
    layout = Layout(Path())
    params = load_params(layout.params)
    check_listed(params, layout.root)
    if params.execution.threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(params.execution.threads)
    if offline:
        os.environ["HF_HUB_OFFLINE"] = "1"
    with exclusive(layout, name), gpu.exclusive(layout, name) if name.split()[0] in gpu.STAGES else nullcontext():
        back_up(layout)
        yield layout, params


def _run(stage: str, iteration: str) -> None:
    from rloo_pipeline import system
    from rloo_pipeline.stages import dispatch
    from rloo_pipeline.tracking import AFTER, in_passing

    with _stage(f"{stage} {iteration}", offline=stage not in dispatch.ONLINE) as (layout, params):
        with system.watched(layout.timings(stage, iteration)):
            dispatch.run(stage, layout, params, iteration)
        if stage in AFTER:
            in_passing(layout, params, stage_ends=True)


@app.command()
def sources(name: Annotated[str, typer.Argument(help="A name under sources in params.yaml.")]) -> None:
    """Record the hash of one of your own files."""
    from rloo_pipeline.stages import sources as stage

    with _stage(f"sources {name}", offline=True) as (layout, params):
        if name not in params.sources:
            raise UserError(f"sources: {layout.params} has no {name}; it has {', '.join(params.sources) or 'none'}")
        stage.run(layout, name, params.sources[name])


@app.command("reward_model")
def reward_model(name: Annotated[str, typer.Argument(help="A name under reward_models in params.yaml.")]) -> None:
    """Train a reward model from preference pairs."""
    _run("reward_model", name)


@app.command()
def prepare(iteration: Annotated[str, typer.Argument(help="Always 0000.")] = INITIAL) -> None:
    """Fetch the initial policy and the prompts."""
    _run("prepare", iteration)


@app.command()
def rollouts(iteration: Iteration) -> None:
    """Sample K completions of each prompt from the previous policy."""
    _run("rollouts", iteration)


@app.command()
def logprobs(iteration: Iteration) -> None:
    """Score the sampled tokens with policy and reference."""
    _run("logprobs", iteration)


@app.command()
def rewards(iteration: Iteration) -> None:
    """Score the completions with the reward components."""
    _run("rewards", iteration)


@app.command()
def advantages(iteration: Iteration) -> None:
    """Turn rewards and KL into advantages by the chosen baseline."""
    _run("advantages", iteration)


@app.command()
def update(iteration: Iteration) -> None:
    """Take the gradient steps: by default a single on-policy one."""
    _run("update", iteration)


@app.command()
def evaluate(iteration: Iteration) -> None:
    """Sample and score the held-out prompts (0000: the initial policy)."""
    _run("evaluate", iteration)


@app.command()
def history() -> None:
    """Collect the metrics of all iterations into one file."""
    from rloo_pipeline import history as stage

    with _stage("history", offline=True) as (layout, params):
        stage.run(layout, params)
