"""The mathematics stands alone, and light stages stay light."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.project import REPOSITORY, environment

FOREIGN = {"vllm", "prefect", "mlflow", "dvc", "pyarrow"}
OBJECTIVE = sorted((REPOSITORY / "rloo_pipeline" / "objective").glob("*.py"))


def imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.add(node.module or "")
    return names


def loaded_by(modules: list[str]) -> set[str]:
    code = f"import importlib, sys\nfor m in {modules!r}: importlib.import_module(m)\nprint(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    return {name.split(".")[0] for name in done.stdout.split()}


@pytest.mark.parametrize("path", OBJECTIVE, ids=lambda path: path.stem)
def test_no_module_of_the_objective_names_a_foreign_package(path: Path) -> None:
    names = imported(path)
    assert not {name.split(".")[0] for name in names} & FOREIGN
    inner = {name for name in names if name.startswith("rloo_pipeline")}
    assert all(name.startswith(("rloo_pipeline.objective", "rloo_pipeline.errors")) for name in inner), inner


def test_loading_the_objective_loads_no_foreign_package() -> None:
    modules = [f"rloo_pipeline.objective.{path.stem}" for path in OBJECTIVE if path.stem != "__init__"]
    assert len(modules) > 5
    assert not loaded_by(modules) & FOREIGN


def test_light_stages_load_no_torch() -> None:
    stages = [f"rloo_pipeline.stages.{name}" for name in ("advantages", "rewards", "sources")]
    heavy = {"torch", "transformers", "vllm", "datasets", "mlflow", "prefect", "dvc"}
    assert not loaded_by(["rloo_pipeline.cli", "rloo_pipeline.history", *stages]) & heavy
