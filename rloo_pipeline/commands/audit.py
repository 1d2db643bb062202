"""Commands that look at what happened and change nothing."""

import os
from pathlib import Path
from typing import Annotated

import typer

from rloo_pipeline.config import load_params
from rloo_pipeline.layout import Layout

app = typer.Typer()
Iteration = Annotated[str, typer.Argument(help="Four-digit id of the iteration, as in 0001.")]


@app.command()
def table() -> None:
    """Print the run as a table, and whether the held-out reward improved."""
    from rloo_pipeline.history import collect
    from rloo_pipeline.table import show, verdict

    layout = Layout(Path())
    params = load_params(layout.params)
    show(layout, params)
    print(verdict(collect(layout, params)))


@app.command()
def verify(
    iteration: Annotated[
        str | None, typer.Argument(help="Four-digit id of the iteration; all if it is left out.")
    ] = None,
    stage: Annotated[str | None, typer.Option(help="The stage to run again; all if it is left out.")] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the directory with what was made anew.")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Run stages again beside the project and compare what they make row by row; exit status 1 if it differs."""
    from rloo_pipeline.audit.verify import verify as command

    layout = Layout(Path())
    params = load_params(layout.params)
    if not command(layout, params, iteration, stage, keep=keep, json_output=json_output):
        raise typer.Exit(1)


@app.command()
def lineage(
    iteration: Iteration, json_output: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False
) -> None:
    """Show what led to an iteration's weights, and check every link by its content; exit status 1 if one is broken."""
    from rloo_pipeline.audit.lineage_report import lineage as command

    layout = Layout(Path())
    if not command(layout, load_params(layout.params), iteration, json_output=json_output):
        raise typer.Exit(1)


@app.command()
def diff(
    a: Annotated[str, typer.Argument(metavar="[REVISION:]ITERATION", help="As in 0001, or HEAD~1:0001.")],
    b: Annotated[str, typer.Argument(metavar="[REVISION:]ITERATION", help="As in 0002, or 0001.")],
    limit: Annotated[int, typer.Option(min=0, help="At most this many examples of each kind; counts are of all.")] = 5,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what differs between two iterations, or between one and what a git revision made of it."""
    from rloo_pipeline.audit.diff import run

    run(Layout(Path()), a, b, limit, json_output=json_output)


@app.command()
def estimators(iteration: Iteration) -> None:
    """Compare all baselines on an iteration's stored completions, the variance of the gradient included.

    Costs one backward pass for each completion. The gradient is that of one
    on-policy step, divided by the number of completions: without
    loss_normalization, sampler correction, KL in the loss, clipping over
    several steps, normalized advantages, max_grad_norm and the optimizer.
    Groups count as independent, also where batch_mean and global_standardized
    couple them. A dash stands where nothing can be compared.
    """
    from rloo_pipeline.audit import estimators as report
    from rloo_pipeline.chain import before
    from rloo_pipeline.stages.context import make_context

    os.environ["HF_HUB_OFFLINE"] = "1"
    layout = Layout(Path())
    params = load_params(layout.params)
    report.run(make_context(params, layout, iteration), params.advantages, before(params, iteration))
