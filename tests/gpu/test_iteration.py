"""One iteration on an NVIDIA GPU, in bfloat16, each stage in its own process."""

import pytest
import torch

from tests.project import Project

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU; torch sees none"),
]
STAGES = ("rollouts", "logprobs", "rewards", "advantages", "update", "evaluate")


@pytest.mark.parametrize("engine", ["transformers", "vllm"])
def test_an_iteration_in_bfloat16(tmp_path, engine):
    project = Project.create(tmp_path / "project")
    if engine == "vllm":
        pytest.importorskip("vllm", reason="vLLM cannot be imported")
    for section in ("rollouts", "logprobs", "update", "evaluate"):
        project.change(f"{section}.dtype", "bfloat16")
    for section in ("rollouts", "evaluate"):
        project.change(f"{section}.engine", engine)
    project.rloo("prepare")
    project.rloo("evaluate", "0000")
    for stage in STAGES:
        project.rloo(stage, "0001")

    assert project.json("metrics/update/0001.json")["grad_norm"] > 0
    # Noise of bfloat16, not other weights: those move a log-prob of this model by whole nats.
    assert project.json("metrics/logprobs/0001.json")["sampler_gap/token_mean"] < 0.2
    assert "cpu" not in project.json("provenance/update/0001.json")["device"]
