"""Commands that tend the project: its chain and its disk."""

from pathlib import Path
from typing import Annotated

import typer

from rloo_pipeline.layout import INITIAL, Layout

app = typer.Typer()


@app.command()
def iterations(count: Annotated[int, typer.Argument(help="How many iterations the chain shall have.")]) -> None:
    """Lengthen or shorten the chain in params.yaml, comments kept."""
    from rloo_pipeline.chain import set_length
    from rloo_pipeline.disk import check_space

    layout = Layout(Path())
    if layout.model(INITIAL).exists():
        missing = [number for number in range(1, count + 1) if not layout.model(f"{number:04d}").exists()]
        check_space(layout, layout.model(INITIAL), len(missing))
    params = set_length(layout.params, count)
    print(f"params.yaml: {len(params.iterations)} iterations; `dvc repro` runs what is new")
