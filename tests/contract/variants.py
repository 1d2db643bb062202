"""Settings other than the defaults, for which a stage's results are kept too."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from safetensors.numpy import load_file

from rloo_pipeline.manifest import read_manifest
from rloo_pipeline.objective.baselines import BASELINES
from rloo_pipeline.schema import ROLLOUTS
from rloo_pipeline.shards import read_shards, write_shards, write_shards_manifest
from tests.lab import Lab

ITERATION, PREVIOUS = "0002", "0001"
INPUTS = ("prompts", "rollouts", "logprobs", "rewards", "policy")


@dataclass(frozen=True)
class Variant:
    """Changed sections, and the stages that run with them on the second iteration."""

    sections: dict[str, dict[str, Any]]
    stages: tuple[str, ...] = ("advantages",)
    sampler_off: bool = field(default=False, kw_only=True)  # log-probs told by the sampler are made to be wrong


BOTH = ("advantages", "update")
AGAIN = ("logprobs", "rewards", *BOTH)
FLATTENING = [0.65, 1.0]  # leaves some groups without signal
SLOW = {"learning_rate": 1e-4, "epochs": 2}
LENGTH = {"beta": 0.2, "kl_normalization": "length"}

VARIANTS: dict[str, dict[str, Variant]] = {
    "advantages": {
        **{name: Variant({"advantages": {"baseline": name}}) for name in BASELINES if name != "leave_one_out"},
        "normalized": Variant({"advantages": {"normalize": True, "kl_estimator": "k3", **LENGTH}}),
        "clipped": Variant({"advantages": {"reward_clip_range": [0.2, 0.7], "kl_estimator": "k2"}}),
        "penalized": Variant(
            {"advantages": {"truncated": "penalize", "missing_eos_penalty": 0.25, "overlong_ramp": [2, 6]}}
        ),
        "masked": Variant({"advantages": {"truncated": "mask", "baseline": "batch_mean", "kl_estimator": "abs"}}),
        "dropped": Variant(
            {"advantages": {"groups_without_signal": "drop", "truncated": "mask", "reward_clip_range": FLATTENING}}
        ),
        "resampled": Variant(
            {
                "rollouts": {"prompts_per_iteration": 2, "oversample": 3.0},
                "advantages": {
                    "groups_without_signal": "resample",
                    "target_kl": 0.5,
                    "reward_clip_range": FLATTENING,
                },
            },
            ("rollouts", "logprobs", "rewards", "advantages"),
        ),
    },
    "update": {
        "clipped": Variant(
            {"update": {**SLOW, "minibatches": 2, "epsilon": 0.05, "epsilon_high": 0.3, "max_grad_norm": None}},
            BOTH,
        ),
        "by_token": Variant(
            {
                "advantages": {"truncated": "mask"},
                "update": {
                    **SLOW,
                    "ratio_level": "token",
                    "sampler_correction": "truncate",
                    "sampler_correction_level": "token",
                    "sampler_correction_cap": 1.1,
                    "sampler_tolerance": 9.0,
                    "loss_normalization": "token",
                },
            },
            AGAIN,
            sampler_off=True,
        ),
        "kl_in_loss": Variant(
            {
                "advantages": {"kl_in": "loss", "kl_estimator": "k3", **LENGTH},
                "update": {
                    **SLOW,
                    "sampler_correction": "mask",
                    "sampler_correction_cap": 1.1,
                    "sampler_tolerance": 9.0,
                },
            },
            AGAIN,
            sampler_off=True,
        ),
        "adapted_kl_in_loss": Variant(
            {
                "advantages": {"kl_in": "loss", "beta": 0.2, "target_kl": 0.5},
                "update": {**SLOW, "ratio_level": "token"},
            },
            BOTH,
        ),
        "constant": Variant(
            {
                "advantages": {"baseline": "moving_average", "target_kl": 0.5},
                "update": {
                    "loss_normalization": "constant",
                    "constant_length": 8,
                    "weight_decay": 0.1,
                    "schedule": "cosine",
                    "schedule_steps": 3,
                },
            },
            BOTH,
        ),
    },
}


class Run:
    """What a variant made of the second iteration of a finished project, in a copy at `folder`."""

    def __init__(self, finished: Path, folder: Path, stage: str, name: str) -> None:
        variant = VARIANTS[stage][name]
        self.stage, self.rate = stage, variant.sections.get("update", {}).get("learning_rate", 1e-3)
        for artifact in INPUTS:
            shutil.copytree(finished / "artifacts" / artifact, folder / "artifacts" / artifact)
        shutil.copyfile(finished / "reward.py", folder / "reward.py")
        shutil.copytree(finished / "sources", folder / "sources")
        self.lab = Lab(folder)
        if variant.sampler_off:
            _shift(self.lab)
        self.lab.run(ITERATION, *variant.stages, **variant.sections)

    def columns(self) -> Iterator[tuple[str, Any]]:
        """Those of the advantages; the state handed on by an update."""
        if self.stage == "update":
            state = self.lab.state(ITERATION)
            yield "state", pa.array([json.dumps(sorted(state))])
            return
        table = self.lab.table("advantages", ITERATION)
        for name in table.column_names:
            yield name, table[name]

    def tensors(self) -> Iterator[tuple[str, npt.NDArray[Any]]]:
        """The step and the optimizer's moments; metrics, but for those that are rounding alone."""
        for name, value in sorted(self.lab.metrics(self.stage, ITERATION).items()):
            if not name.startswith("sampler_gap"):
                yield f"metrics/{name}", np.array([value], np.float64)
        if self.stage != "update":
            return
        policy = self.lab.root / "artifacts" / "policy"
        before, after = (load_file(policy / each / "model" / "model.safetensors") for each in (PREVIOUS, ITERATION))
        yield from ((f"step/{name}", (after[name] - before[name]) / self.rate) for name in sorted(after))
        yield from sorted(load_file(policy / ITERATION / "trainer_state" / "optimizer.safetensors").items())


def _shift(lab: Lab) -> None:
    """Sampler's log-probs up to a quarter of a nat off, by another amount at every token."""
    folder = lab.layout.rollouts(ITERATION)
    table, facts = read_shards(folder), read_manifest(folder)["facts"]
    column = table["sampler_logprobs"].combine_chunks()
    flat = column.flatten().to_numpy() + 0.25 * np.sin(np.arange(len(column.flatten())), dtype=np.float32)
    shifted = pa.ListArray.from_arrays(column.offsets, pa.array(flat))
    table = table.set_column(table.column_names.index("sampler_logprobs"), "sampler_logprobs", shifted)
    shutil.rmtree(folder)
    write_shards_manifest(folder, write_shards(folder, 1, lambda _: table, ROLLOUTS), facts)
