"""The number of each stage's algorithm: the package's own, and the copy that a project without its source has."""

from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from rloo_pipeline.files import write_whole

STAGE = "algorithms"  # the DVC stage of such projects that brings the copy up to date
FILE = Path("algorithms.yaml")
HEADER = "# Written by `rloo algorithms` from the installed package: the stages depend on these numbers.\n"


@cache
def installed() -> dict[str, int]:
    """The numbers of the installed package, by stage."""
    return _yaml(resources.files("rloo_pipeline").joinpath(FILE.name).read_text())


def followed(root: Path) -> bool:
    """Whether the project has a copy of its own: its dvc.yaml has the stage that writes it."""
    graph = root / "dvc.yaml"
    return graph.exists() and STAGE in _yaml(graph.read_text(encoding="utf-8")).get("stages", {})


def refresh(root: Path) -> list[str]:
    """Bring the project's copy up to date; returns what changed, as in `rewards 1 -> 2`. Equal numbers: no write."""
    path, now = root / FILE, installed()
    before = _yaml(path.read_text(encoding="utf-8")) if path.exists() else {}
    if before == now:
        return []
    lines = [f"{stage}: {number}\n" for stage, number in now.items()]
    write_whole(path, "".join([HEADER, *lines]).encode())
    return [
        f"{stage} {before.get(stage, 'none')} -> {now.get(stage, 'none')}"
        for stage in {**before, **now}
        if before.get(stage) != now.get(stage)
    ]


def _yaml(text: str) -> dict[str, Any]:
    from ruamel.yaml import YAML

    return YAML(typ="safe").load(text) or {}
