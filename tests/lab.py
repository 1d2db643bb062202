"""A tiny project whose stages run in the test's own process."""

import copy
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors.torch import load_file

from rloo_pipeline.config import IterationConfig, parse_params
from rloo_pipeline.layout import Layout
from rloo_pipeline.stages import advantages, logprobs, prepare, rewards, rollouts, update
from rloo_pipeline.stages.context import Context, make_context
from tests.conftest import varied_project
from tests.project import PARAMS

STAGES = {
    "rollouts": rollouts,
    "logprobs": logprobs,
    "rewards": rewards,
    "advantages": advantages,
    "update": update,
}
SAMPLED = ("rollouts", "logprobs", "rewards")


class Lab:
    """A project whose stages run in this process, with the settings of each call."""

    def __init__(self, root: Path) -> None:
        self.root, self.layout = root, Layout(root)

    def run(self, iteration: str, *stages: str, **sections: dict[str, Any]) -> None:
        """Run stages of an iteration with keys of sections changed."""
        values = copy.deepcopy(PARAMS)
        for name, changes in sections.items():
            values[name] |= changes
        params = parse_params(values)
        for stage in stages:
            STAGES[stage].run(make_context(params, self.layout, iteration), getattr(params, stage))

    def table(self, stage: str, iteration: str) -> pa.Table:
        """All rows of an artifact."""
        files = sorted((self.root / "artifacts" / stage / iteration).glob("*.parquet"))
        return pa.concat_tables([pq.read_table(file, partitioning=None) for file in files])

    def json(self, path: str) -> Any:
        """A JSON file of the project."""
        return json.loads((self.root / path).read_text())

    def metrics(self, stage: str, iteration: str) -> dict[str, float]:
        """A stage's metrics."""
        return dict(self.json(f"metrics/{stage}/{iteration}.json"))

    def state(self, iteration: str) -> dict[str, Any]:
        """The JSON part of a trainer state."""
        return dict(self.json(f"artifacts/policy/{iteration}/trainer_state/state.json"))

    def weights(self, iteration: str) -> dict[str, torch.Tensor]:
        """A policy's tensors."""
        return load_file(self.root / "artifacts" / "policy" / iteration / "model" / "model.safetensors")


def sampled_lab(root: Path) -> Lab:
    """A varied project with iteration 0001 done and 0002 sampled, scored and rewarded."""
    lab = Lab(varied_project(root).root)
    params = parse_params(PARAMS)
    limits = {"train": params.rollouts.max_tokens, "eval": params.evaluate.max_tokens}
    link = IterationConfig(previous="0000", reference="0000")
    context = Context(lab.layout, "0000", link, params.seed, params.execution)
    prepare.run(context, params.policy, params.prompts, limits, len(params.iterations))
    lab.run("0001", *STAGES, update={"learning_rate": 5e-3})
    lab.run("0002", *SAMPLED)
    return lab
