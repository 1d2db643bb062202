import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rloo_pipeline.engines import Sample

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def work(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("vllm")


def as_samples(value: Any) -> Any:
    """Turn what JSON made of lists of samples back into samples."""
    if isinstance(value, list) and value and isinstance(value[0], dict) and "token_ids" in value[0]:
        return [Sample(**fields) for fields in value]
    return value


@pytest.fixture(scope="session")
def run(work) -> Callable[[str], dict[str, Any]]:
    """Run a scenario in a process and a folder of its own and return what it found; skip where vLLM is missing."""

    def run_scenario(name: str, place: Path | None = None) -> dict[str, Any]:
        out = work / f"{name}.json"
        folder = place or work / name
        folder.mkdir(exist_ok=True)
        command = [sys.executable, "-m", "tests.vllm.scenarios", name, str(folder), str(out)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr[-4000:]
        found = json.loads(out.read_text())
        if "skip" in found:
            pytest.skip(found["skip"])
        return {key: as_samples(value) for key, value in found.items()}

    return run_scenario
