"""Commands that tend the project: its chain and its disk."""

from pathlib import Path
from typing import Annotated

import typer

from rloo_pipeline.layout import INITIAL, Layout

app = typer.Typer()


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new or an empty folder.")],
    example: Annotated[str | None, typer.Option(help="The example to start from; without it they are listed.")] = None,
) -> None:
    """Start a project of your own from an example, with git and DVC set up."""
    from rloo_pipeline.init import start

    start(folder, example)


@app.command()
def algorithms() -> None:
    """Bring a project's algorithms.yaml up to the installed package; `dvc repro` runs this first."""
    from rloo_pipeline.algorithms import FILE, refresh

    print(f"{FILE}: {', '.join(refresh(Path())) or 'as before, the installed package has the same algorithms'}")


@app.command()
def check() -> None:
    """Look the project over without running it: what would fail, what it takes and what it costs in tokens."""
    from rloo_pipeline.check.run import run

    raise typer.Exit(run(Layout(Path())))


@app.command()
def iterations(count: Annotated[int, typer.Argument(help="How many iterations the chain shall have.")]) -> None:
    """Lengthen or shorten the chain in params.yaml, comments kept."""
    from rloo_pipeline.chain import set_length
    from rloo_pipeline.disk import check_space

    layout = Layout(Path())
    if layout.model(INITIAL).exists():
        # Metrics and not weights: a pruned iteration is not written again.
        missing = [number for number in range(1, count + 1) if not layout.metrics("update", f"{number:04d}").exists()]
        check_space(layout, layout.model(INITIAL), len(missing))
    params = set_length(layout.params, count)
    print(f"params.yaml: {len(params.iterations)} iterations; `dvc repro` runs what is new")


@app.command()
def prune(
    keep_last: Annotated[int, typer.Option(min=1, help="Keep the policies of the last N finished iterations.")],
    keep_every: Annotated[int | None, typer.Option(min=1, help="Keep those of every M-th iteration too.")] = None,
    all_revisions: Annotated[
        bool, typer.Option("--all-revisions", help="Drop what other branches, tags and experiments hold too.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would go, and remove nothing.")] = False,
) -> None:
    """Drop weights and trainer state of the other iterations from the DVC cache and the work tree; 0000 stays."""
    from rloo_pipeline import prune as command
    from rloo_pipeline.prune_plan import Rule

    command.run(Layout(Path()), Rule(keep_last, keep_every, all_revisions), dry_run=dry_run)


@app.command()
def clean(
    everything: Annotated[bool, typer.Option("--all", help="Remove what a next run could go on from too.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would go, and remove nothing.")] = False,
) -> None:
    """Remove what killed runs left behind and no next run will use; refused while a stage runs."""
    from rloo_pipeline import leftovers
    from rloo_pipeline.config import load_params

    layout = Layout(Path())
    leftovers.clean(layout, load_params(layout.params), everything=everything, dry_run=dry_run)
