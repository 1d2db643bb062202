"""Files of the user's own: every edit is seen, nothing made under an older one is used."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import CommandLine
from tests.project import Project

IMPORTING = """
from helper import VALUE

def score(completions, prompt_id, **kwargs):
    {guard}
    return [VALUE] * len(completions)
"""
FAILS_LATER = 'if prompt_id[0] == "{last}": raise RuntimeError("not yet")'


@pytest.fixture
def project(finished_project: Project, tmp_path: Path) -> Project:
    """A finished project whose reward file imports another of its files."""
    copied = finished_project.copy(tmp_path / "project")
    params = copied.params()
    params["sources"]["helper"] = {"path": "helper.py", "used_by": "rewards"}
    copied.write_params(params)
    (copied.root / "helper.py").write_text("VALUE = 0.25\n")
    return copied


def test_a_partial_scored_with_an_older_helper_is_not_used(project: Project, rloo: CommandLine) -> None:
    """The first shard is scored, the second fails; then a file that the reward imports is edited."""
    import pyarrow.parquet as pq

    rollouts = project.root / "artifacts/rollouts/0001"
    last = pq.read_table(rollouts / "shard-00001.parquet")["prompt_id"][0].as_py()
    (project.root / "reward.py").write_text(IMPORTING.format(guard=FAILS_LATER.format(last=last)))
    assert "not yet" in rloo(project, "rewards", "0001").stderr
    assert list((project.root / ".rloo/work/rewards/0001").glob("*/shard-00000.parquet"))

    (project.root / "helper.py").write_text("VALUE = 0.75\n")
    (project.root / "reward.py").write_text(IMPORTING.format(guard="").replace("from helper", "#\nfrom helper"))
    project.rloo("rewards", "0001")
    rewards = [
        value
        for shard in sorted((project.root / "artifacts/rewards/0001").glob("*.parquet"))
        for value in pq.read_table(shard)["reward"].to_pylist()
    ]
    assert rewards == [0.75] * 16


def test_the_record_of_a_source_no_longer_listed_is_refused(project: Project, rloo: CommandLine) -> None:
    project.rloo("sources", "helper")
    params = project.params()
    del params["sources"]["helper"]
    project.write_params(params)
    told = rloo(project, "rewards", "0001")
    assert told.code == 2
    assert "sources/rewards/helper.json" in told.stderr


def test_sources_is_asked_for(project: Project, rloo: CommandLine) -> None:
    """DVC cannot do without the key either."""
    params = project.params()
    del params["sources"]
    project.write_params(params)
    told = rloo(project, "rewards", "0001")
    assert told.code == 2
    assert "params.yaml: sources: this key is missing" in told.stderr


@pytest.mark.parametrize("stage", ["rollouts", "logprobs", "rewards", "advantages", "update"])
def test_the_initial_policy_has_no_such_stage(project: Project, rloo: CommandLine, stage: str) -> None:
    told = rloo(project, stage, "0000")
    assert told.code == 2
    assert "iteration 0000 is not in" in told.stderr


def test_a_reward_that_exits_is_an_error(project: Project, rloo: CommandLine) -> None:
    (project.root / "reward.py").write_text("def score(**kwargs):\n    raise SystemExit(0)\n")
    told = rloo(project, "rewards", "0001")
    assert told.code == 2
    assert "reward.py:score raised SystemExit" in told.stderr


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def _scribble(path: Path) -> None:
    path.write_bytes(b"\x08\0\0\0\0\0\0\0not json")


@pytest.mark.parametrize("damage", [_cut, _scribble])
def test_damaged_weights_are_named(project: Project, rloo: CommandLine, damage: Callable[[Path], None]) -> None:
    weights = project.root / "artifacts/policy/0000/model/model.safetensors"
    shutil.copyfile(weights, weights.with_suffix(".copy"))
    weights.unlink()
    weights.with_suffix(".copy").rename(weights)
    damage(weights)
    told = rloo(project, "logprobs", "0001")
    assert told.code == 2
    assert "policy/0000/model/model.safetensors" in told.stderr


def test_throughputs_are_reported(finished_project: Project) -> None:
    for stage in ("rollouts", "logprobs", "update", "evaluate"):
        timings = json.loads((finished_project.root / f"timings/{stage}/0001.json").read_text())
        assert timings["tokens_per_second"] > 0


def test_a_chain_that_will_not_fit_the_disk_is_refused(
    project: Project, rloo: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rloo_pipeline.disk.BYTES_PER_PARAMETER", 10**15)
    before = (project.root / "params.yaml").read_text()
    told = rloo(project, "iterations", "3")
    assert told.code == 2
    assert "1 iterations will write" in told.stderr
    assert (project.root / "params.yaml").read_text() == before
