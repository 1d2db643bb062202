"""What each stage makes of a tiny fixed input, in a form that survives another build of torch.

Ids, texts, names and counts are hashed as they are. Floats are told by three numbers for each column or tensor,
which are compared with a tolerance. After raising a stage's number in algorithms.yaml, write the file anew:

    python -m tests.contract.behaviour
"""

import hashlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from ruamel.yaml import YAML
from safetensors.numpy import load_file

from rloo_pipeline.layout import STAGES
from rloo_pipeline.shards import read_shards, read_table
from tests.contract.variants import VARIANTS, Run
from tests.enumeration import one_thread
from tests.project import REPOSITORY, Project

FILE = Path(__file__).with_name("behaviour.json")
ALGORITHMS = REPOSITORY / "rloo_pipeline" / "algorithms.yaml"
# A hash of weights, which another build of torch draws otherwise in the last bit.
UNSTABLE = ("policy_fingerprint",)
TOLERANCE = 1e-3  # of a column's or tensor's root mean square

Behaviour = dict[str, Any]


def versions() -> dict[str, int]:
    """The number of each stage's algorithm."""
    return dict(YAML(typ="safe").load(ALGORITHMS.read_text(encoding="utf-8")))


def of_stage(project: Project, stage: str) -> Behaviour:
    """What a stage did by the settings of the tests' project, mostly the defaults."""
    return told(_columns(project, stage), _tensors(project, stage))


def of_variant(finished: Path, folder: Path, stage: str, name: str) -> Behaviour:
    """What a stage does by other settings on the inputs of a finished project, which are copied to `folder`."""
    with one_thread():
        run = Run(finished, folder, stage, name)
    return told(run.columns(), run.tensors())


def told(columns: Iterator[tuple[str, Any]], tensors: Iterator[tuple[str, npt.NDArray[Any]]]) -> Behaviour:
    """The hash of what must be equal, and the numbers that must be close."""
    exact: dict[str, Any] = {}
    numbers: dict[str, list[float]] = {}
    for name, column in columns:
        values = pa.concat_arrays(column.chunks) if isinstance(column, pa.ChunkedArray) else column
        flat = values.flatten() if pa.types.is_list(values.type) else values
        if pa.types.is_floating(flat.type):
            exact[name] = [str(values.type), values.is_null().to_pylist()]
            numbers[name] = summary(flat.drop_null().to_numpy())
        else:
            exact[name] = [str(values.type), values.to_pylist()]
    for name, array in tensors:
        exact[name] = [str(array.dtype), list(array.shape)]
        numbers[name] = summary(array.astype(np.float64).ravel())
    content = json.dumps(exact, sort_keys=True).encode()
    return {"sha256": hashlib.sha256(content).hexdigest(), "numbers": numbers}


def summary(values: npt.NDArray[np.floating]) -> list[float]:
    """Mean, root mean square, and a mean weighted by position, so that the order counts."""
    values = values.astype(np.float64)
    if not len(values):
        return []
    positions = np.cos(np.arange(len(values)))
    size = float(np.sqrt(np.mean(values**2)))
    return [float(f"{number:.4g}") for number in (values.mean(), size, np.mean(values * positions))]


def close(stored: list[float], found: list[float]) -> bool:
    """Whether two summaries are of the same values, rounding aside."""
    if not stored or not found:
        return stored == found
    return bool(np.allclose(stored, found, rtol=0, atol=TOLERANCE * stored[1] + 1e-12))


def _columns(project: Project, stage: str) -> Iterator[tuple[str, Any]]:
    artifacts = project.root / "artifacts"
    if stage == "prepare":
        tables = {name: read_table(artifacts / "prompts" / f"{name}.parquet")[0] for name in ("train", "eval")}
    elif stage == "update":
        tables = {}
    else:
        folder = artifacts / ("evaluation" if stage == "evaluate" else stage)
        tables = {iteration: read_shards(folder / iteration) for iteration in ("0001", "0002")}
    for name, table in tables.items():
        for column in table.column_names:
            if column not in UNSTABLE:
                yield f"{name}/{column}", table[column]


def _tensors(project: Project, stage: str) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    policy = project.root / "artifacts" / "policy"
    if stage == "prepare":
        yield from sorted(load_file(policy / "0000" / "model" / "model.safetensors").items())
    if stage == "update":
        before, after = (load_file(policy / name / "model" / "model.safetensors") for name in ("0000", "0001"))
        rate = project.params()["update"]["learning_rate"]
        yield from ((f"step/{name}", (after[name] - before[name]) / rate) for name in sorted(after))
        yield from sorted(load_file(policy / "0001" / "trainer_state" / "optimizer.safetensors").items())


def main() -> None:
    """Make a project and write what its stages did."""
    from tests.conftest import finish

    with tempfile.TemporaryDirectory() as folder:
        write(finish(Path(folder) / "project"), Path(folder))


def write(project: Project, folder: Path) -> None:
    """Write what the stages of a finished project did, and do by other settings."""
    found: dict[str, Any] = {stage: {"version": versions()[stage], **of_stage(project, stage)} for stage in STAGES}
    for stage, variants in VARIANTS.items():
        found[stage]["variants"] = {
            name: of_variant(project.root, folder / stage / name, stage, name) for name in variants
        }
    FILE.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    print(f"wrote {FILE.relative_to(REPOSITORY)}")


if __name__ == "__main__":
    main()
