"""Which stage reads and makes what, by the names that provenance uses, and the fingerprints of what is in place."""

from collections.abc import Mapping
from pathlib import Path

import pyarrow.parquet as pq

from rloo_pipeline import fingerprint
from rloo_pipeline.config import IterationConfig, Params
from rloo_pipeline.errors import UserError
from rloo_pipeline.layout import INITIAL, REWARD_MODEL, Layout, reward_model_at
from rloo_pipeline.manifest import read_manifest

SOURCE = "source:"
PROMPTS = ("train", "eval")
MODEL_TABLES = {"pairs": "eval", "steps": "steps"}  # of a reward model: output to file


def stages_of(iteration: str) -> tuple[str, ...]:
    """The stages that leave provenance for an iteration (or a reward model), in the order of running."""
    if is_reward_model(iteration):
        return (REWARD_MODEL,)
    if iteration == INITIAL:
        return ("prepare", "evaluate")
    return ("rollouts", "logprobs", "rewards", "advantages", "update", "evaluate")


def is_reward_model(iteration: str) -> bool:
    """Whether what stands in the place of an iteration's id is a reward model's name, which begins with a letter."""
    return iteration[:1].isalpha()


def link_of(params: Params, iteration: str) -> IterationConfig:
    """The iteration's entry in the chain; UserError if there is none.

    The initial policy's links are to itself, and those of a reward model are not used.
    """
    if iteration == INITIAL or is_reward_model(iteration):
        return IterationConfig(previous=INITIAL, reference=INITIAL)
    if iteration not in params.iterations:
        known = ", ".join((INITIAL, *params.iterations))
        raise UserError(f"iteration {iteration} is not in params.yaml, which has {known}")
    return params.iterations[iteration]


def outputs(layout: Layout, stage: str, iteration: str) -> dict[str, Path]:
    """Where a stage's outputs lie, by name."""
    if stage == "evaluate":
        return {"evaluation": layout.evaluation(iteration)}
    if stage == REWARD_MODEL:
        tables = {name: layout.preferences(iteration) / f"{file}.parquet" for name, file in MODEL_TABLES.items()}
        return {"model": layout.reward_model(iteration)} | tables
    if stage not in ("prepare", "update"):
        return {stage: layout.artifacts / stage / iteration}
    policy = {"policy": layout.model(iteration), "trainer_state": layout.trainer_state(iteration)}
    return policy | ({name: prompts(layout, name) for name in PROMPTS} if stage == "prepare" else {})


def prompts(layout: Layout, split: str) -> Path:
    """The table of the train or eval prompts."""
    return layout.prompts / f"{split}.parquet"


def input_path(layout: Layout, stage: str, iteration: str, link: IterationConfig, role: str) -> Path:
    """Where the input lies that a stage's provenance calls `role`."""
    if role.startswith(SOURCE):
        return layout.root / role.removeprefix(SOURCE)
    if role == "policy":
        return layout.model(iteration if stage == "evaluate" else link.previous)
    if role == "reference":
        return layout.model(link.reference)
    if role == "trainer_state":
        return layout.trainer_state(link.previous)
    if role == "opponent":
        return layout.evaluation(INITIAL)
    if role == "prompts":
        return prompts(layout, "eval" if stage == "evaluate" else "train")
    return layout.artifacts / role / iteration


def maker(stage: str, iteration: str, link: IterationConfig, role: str) -> tuple[str, str] | None:
    """The stage and iteration that made the input `role`; None for a file of the user's own."""
    if role.startswith(SOURCE):
        trained = reward_model_at(Path(role.removeprefix(SOURCE)))
        return (REWARD_MODEL, trained) if trained else None
    if role == "prompts":
        return "prepare", INITIAL
    if role == "opponent":
        return "evaluate", INITIAL
    if role not in ("policy", "reference", "trainer_state"):
        return role, iteration
    policy = link.reference if role == "reference" else iteration if stage == "evaluate" else link.previous
    return ("prepare" if policy == INITIAL else "update"), policy


def output_fingerprint(stage: str, parts: Mapping[str, str]) -> str:
    """What provenance calls the stage's output, from the fingerprints of its outputs by name."""
    if stage == "prepare":
        return fingerprint.of_json({name: parts[name] for name in ("policy", *PROMPTS)})
    if stage == "update":
        return fingerprint.of_json([parts["policy"], parts["trainer_state"]])
    if stage == REWARD_MODEL:
        return fingerprint.of_json({name: parts[name] for name in ("model", *MODEL_TABLES)})
    (only,) = parts.values()
    return only


def exists(path: Path) -> bool:
    """Whether there is an artifact at this path."""
    return path.is_file() or (path / fingerprint.MANIFEST).exists()


def stored_fingerprint(path: Path) -> str:
    """The fingerprint that an artifact states of itself, its content unread; UserError if it states none."""
    if path.suffix != ".parquet":
        return str(read_manifest(path)["fingerprint"])
    try:
        metadata = pq.read_schema(path).metadata or {}
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: not readable as Parquet ({error}); restore it with `dvc checkout`") from error
    return str(metadata.get(b"fingerprint", b"").decode())
