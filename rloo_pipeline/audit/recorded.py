"""What made an artifact, from its provenance, beside what params.yaml and this machine would make it with now."""

from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter, ValidationError

from rloo_pipeline.audit.compare import Change, compare_values
from rloo_pipeline.config import ExecutionConfig, Params, RewardConfig, RewardModelConfig
from rloo_pipeline.errors import UserError
from rloo_pipeline.layout import REWARD_MODEL

REWARDS: TypeAdapter[tuple[RewardConfig, ...]] = TypeAdapter(tuple[RewardConfig, ...])
CONDITIONS = ("algorithm_version", "device", "engine", "execution", "versions")
BATCH_SHAPES = ("logprobs_batch_tokens", "update_microbatch_tokens", "rewards_batch_tokens", "gradient_checkpointing")
SECTIONS = ("rollouts", "logprobs", "advantages", "update", "evaluate")


def recorded_params(params: Params, stage: str, iteration: str, provenance: Mapping[str, Any]) -> Params:
    """`params` with the stage's settings as its provenance tells them; raises UserError if they cannot be read."""
    settings = provenance["settings"]
    try:
        sections = [name for name in SECTIONS if name in settings]
        new: dict[str, Any] = {name: type(getattr(params, name)).model_validate(settings[name]) for name in sections}
        if "rewards" in settings:
            new["rewards"] = REWARDS.validate_python(settings["rewards"])
        if stage == REWARD_MODEL:
            model = RewardModelConfig.model_validate(settings[REWARD_MODEL])
            new["reward_models"] = {**params.reward_models, iteration: model}
        if stage == "prepare":
            for name in ("policy", "prompts"):
                new[name] = type(getattr(params, name)).model_validate(settings[name])
            for name, split in (("rollouts", "train"), ("evaluate", "eval")):
                update = {"max_tokens": settings["max_tokens"][split]}
                new[name] = getattr(params, name).model_copy(update=update)
        execution = ExecutionConfig.model_validate(params.execution.model_dump() | _batch_shapes(provenance))
    except (ValidationError, KeyError, TypeError) as error:
        raise UserError(
            f"{stage} {iteration}: its recorded settings are not those of this version of the package: {error}; "
            "install the version that made it"
        ) from error
    if stage == "evaluate" and iteration in params.iterations:
        item = params.iterations[iteration].model_copy(update={"evaluate": not settings.get("skipped", False)})
        new["iterations"] = params.iterations | {iteration: item}
    return params.model_copy(update={"seed": provenance["seed"], "execution": execution} | new)


def _batch_shapes(provenance: Mapping[str, Any]) -> dict[str, Any]:
    """The recorded settings of execution on which the last bits of results depend, threads apart."""
    recorded = {name: value for name, value in provenance.get("execution", {}).items() if name in BATCH_SHAPES}
    engine = provenance.get("engine", {})
    if isinstance(engine, Mapping) and "batch_size" in engine:
        recorded["generation_batch_size"] = engine["batch_size"]
    return recorded


def changed(params: Params, made_with: Params, stage: str) -> list[Change]:
    """The settings of the stage that params.yaml gives other values than it was made with."""
    of_stage: dict[str, dict[str, Any]] = {
        "prepare": {"policy": True, "prompts": True, "rollouts": {"max_tokens"}, "evaluate": {"max_tokens"}},
        "evaluate": {"evaluate": True, "rewards": True},
        REWARD_MODEL: {"reward_models": True},
    }
    included = {"seed": True, **of_stage.get(stage, {stage: True})}
    then, now = (item.model_dump(mode="json", include=included) for item in (made_with, params))
    return compare_values(then, now)


def conditions(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[Change]:
    """Versions, device and the like that differ between two provenances which both tell them."""
    shared = [name for name in CONDITIONS if name in then and name in now]
    return compare_values({name: then[name] for name in shared}, {name: now[name] for name in shared})
