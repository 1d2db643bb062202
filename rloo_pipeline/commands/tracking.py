"""Commands around MLflow: log what the files say, and find what belongs together."""

from pathlib import Path
from typing import Annotated

import typer

from rloo_pipeline.config import load_params
from rloo_pipeline.layout import Layout

app = typer.Typer()


@app.command()
def track(
    copy_models: Annotated[bool, typer.Option("--copy-models", help="Upload the checkpoints' files as well.")] = False,
) -> None:
    """Log to MLflow whatever the project's files say and its run does not hold yet."""
    from rloo_pipeline import tracking

    layout = Layout(Path())
    done = tracking.track_now(layout, load_params(layout.params), copy_models=copy_models)
    print(f"{'new run' if done.new_run else 'run'} {done.run_id}: {done.new_points} new points")
    for text in done.not_finite:
        print(f"not a finite number, told in the tag rloo.not_finite: {text}")
    print(tracking.run_url(layout) or "`mlflow ui --backend-store-uri sqlite:///mlflow.db` shows it")


@app.command()
def find(
    name: Annotated[str, typer.Argument(help="A git revision, a hash of dvc.lock, a Prefect run or an MLflow run.")],
) -> None:
    """Print which git revision, dvc.lock, Prefect run and MLflow run belong together."""
    from rloo_pipeline.tracking.find import find as search

    print("\n".join(search(Layout(Path()), name).lines()))
