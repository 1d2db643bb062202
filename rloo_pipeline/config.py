"""params.yaml as frozen models: unknown keys are refused, every field says what it means and its unit."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, ValidationError, field_validator, model_validator

from rloo_pipeline.data_config import PromptsConfig as PromptsConfig
from rloo_pipeline.errors import UserError
from rloo_pipeline.layout import INITIAL
from rloo_pipeline.objective.baselines import check_completions
from rloo_pipeline.objective_config import AdvantagesConfig as AdvantagesConfig
from rloo_pipeline.objective_config import UpdateConfig as UpdateConfig
from rloo_pipeline.reward_config import KINDS, Address, ServiceReward
from rloo_pipeline.reward_config import RewardConfig as RewardConfig
from rloo_pipeline.reward_model_config import ModelName
from rloo_pipeline.reward_model_config import RewardModelConfig as RewardModelConfig
from rloo_pipeline.section import Dtype, Name, Section

EngineName = Literal["auto", "vllm", "transformers"]


class IterationConfig(Section):
    """One link of the chain."""

    previous: str = Field(description="Id of the policy that is sampled and updated.")
    reference: str = Field(description="Id of the policy that the KL is taken to.")
    evaluate: bool = Field(default=True, description="Whether the updated policy is evaluated.")


class SourceConfig(Section):
    """A file or directory of the user's own that a stage reads."""

    path: Path = Field(description="File or directory, relative to the project.")
    used_by: Literal["policy", "prompts", "rewards", "reward_models"] = Field(
        description="The params section that names it."
    )


class PolicyConfig(Section):
    """The initial policy, which is also the reference of the first iteration."""

    model: str = Field(
        description="Hub id, local directory, or package:<python package>[/<file>.gguf] for weights in a package."
    )
    revision: str | None = Field(default=None, description="Branch, tag or commit of a hub model.")
    trust_remote_code: bool = Field(default=False, description="Whether code that comes with the model may run.")


class SamplingConfig(Section):
    """How completions are sampled."""

    engine: EngineName = Field(default="auto", description="Who generates; auto: vllm where it can be imported.")
    dtype: Dtype = Field(default="float32", description="Precision of the weights in the engine.")
    max_tokens: int = Field(ge=1, description="Longest completion, tokens.")
    temperature: float = Field(default=1.0, gt=0, description="Sampling temperature; logits are divided by it.")
    prompts_per_shard: int = Field(default=64, ge=1, description="Prompts whose completions make one Parquet file.")


class RolloutsConfig(SamplingConfig):
    """K completions for each of P prompts."""

    completions_per_prompt: int = Field(ge=1, description="K, completions per prompt.")
    prompts_per_iteration: int = Field(ge=1, description="P, prompts per iteration.")
    oversample: float = Field(
        default=1.0,
        ge=1,
        description="Prompts drawn per prompt wanted, for advantages.groups_without_signal: resample.",
    )
    top_p: float = Field(default=1.0, description="Must stay 1: nucleus sampling is refused for training rollouts.")
    top_k: int = Field(default=0, description="Must stay 0: top-k sampling is refused for training rollouts.")
    min_p: float = Field(default=0.0, description="Must stay 0: min-p sampling is refused for training rollouts.")
    repetition_penalty: float = Field(default=1.0, description="Must stay 1: penalties are refused.")

    @property
    def prompts_drawn(self) -> int:
        """How many prompts are sampled for, those in surplus included."""
        # Rounded first, because 10 * 1.1 is a little more than 11.
        return math.ceil(round(self.prompts_per_iteration * self.oversample, 6))

    @property
    def prompts_asked(self) -> str:
        """prompts_drawn as a message tells it."""
        drawn = f" x oversample {self.oversample:g} = {self.prompts_drawn}" if self.oversample > 1 else ""
        return f"{self.prompts_per_iteration}{drawn}"

    @model_validator(mode="after")
    def _whole_distribution(self) -> Self:
        neutral = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
        for key, value in neutral.items():
            if getattr(self, key) != value:
                raise ValueError(
                    f"{key}={getattr(self, key)} is refused: it would sample from a renormalized distribution that "
                    f"the trainer's log-probs are not of, so the gradient would be wrong; leave {key} at {value}"
                )
        return self


class LogprobsConfig(Section):
    """Log-probs of policy and reference for every sampled token."""

    reference: bool = Field(default=True, description="Whether the reference is scored too; false needs beta 0.")
    dtype: Dtype = Field(default="float32", description="Precision of the forward pass; log-softmax is float32.")


class EvaluateConfig(SamplingConfig):
    """Held-out prompts, n samples each."""

    samples_per_prompt: int = Field(default=1, ge=1, description="n, samples per held-out prompt.")
    pass_k: tuple[int, ...] = Field(default=(1,), description="The k of pass@k, each at most samples_per_prompt.")
    pass_threshold: float = Field(default=1.0, description="A sample passes if its reward is at least this.")
    bootstrap_resamples: int = Field(default=2000, ge=100, description="Resamples of prompts for the intervals.")
    opponent_column: str | None = Field(
        default=None,
        description="Column of the held-out prompts with the dataset's own completion, text or [one message].",
    )

    @model_validator(mode="after")
    def _k_fits(self) -> Self:
        for k in self.pass_k:
            if not 1 <= k <= self.samples_per_prompt:
                raise ValueError(f"pass_k: {k} is not between 1 and samples_per_prompt ({self.samples_per_prompt})")
        return self


class ExecutionConfig(Section):
    """Whatever cannot change results: no stage depends on it."""

    threads: int | None = Field(default=None, ge=1, description="CPU threads; null: all cores.")
    logprobs_batch_tokens: int = Field(default=8192, ge=1, description="Padded tokens of one forward pass.")
    update_microbatch_tokens: int = Field(default=4096, ge=1, description="Padded tokens of one backward pass.")
    rewards_batch_tokens: int = Field(default=8192, ge=1, description="Padded tokens of a reward model's pass.")
    generation_batch_size: int = Field(default=64, ge=1, description="Rows at once in the transformers engine.")
    gradient_checkpointing: bool = Field(default=False, description="Recompute activations to save memory.")
    gpu_memory_utilization: float = Field(default=0.85, gt=0, le=1, description="Share of the GPU for vLLM.")
    reward_workers: int | None = Field(
        default=None,
        ge=1,
        description="Processes that score rows alone after a batch failed; null: all cores.",
    )
    service_addresses: dict[Name, Address] = Field(
        default_factory=dict, description="Name of a reward to the address that takes the place of its url."
    )
    service_batch_size: int = Field(default=64, ge=1, description="Completions in one request to a reward service.")
    service_concurrency: int = Field(default=8, ge=1, description="Requests to a reward service at the same time.")
    service_retries: int = Field(default=5, ge=0, description="Further attempts after a request to a service failed.")
    cpu_kv_cache_gib: int = Field(default=1, ge=1, description="KV cache of vLLM on a CPU, GiB.")
    tracking: bool = Field(default=True, description="Whether update and evaluate log the project to MLflow.")


class Params(Section):
    """The whole of params.yaml."""

    seed: int = Field(ge=0, description="Every random choice is derived from it.")
    iterations: dict[str, IterationConfig] = Field(description="The chain, by four-digit id.")
    sources: dict[Name, SourceConfig] = Field(
        description="Files of the user's own that stages read: editing one reruns its users; {} if there are none."
    )
    policy: PolicyConfig
    reward_models: dict[ModelName, RewardModelConfig] = Field(
        description="Reward models to train from preference pairs, by name; {} if there are none."
    )
    prompts: PromptsConfig
    rollouts: RolloutsConfig
    logprobs: LogprobsConfig = LogprobsConfig()
    rewards: tuple[RewardConfig, ...] = Field(min_length=1, description="The components of the reward.")
    advantages: AdvantagesConfig = AdvantagesConfig()
    update: UpdateConfig
    evaluate: EvaluateConfig
    execution: ExecutionConfig = ExecutionConfig()

    @field_validator("iterations")
    @classmethod
    def _chain(cls, value: dict[str, IterationConfig]) -> dict[str, IterationConfig]:
        for key, item in value.items():
            for role, other in (("previous", item.previous), ("reference", item.reference)):
                for name in (key, other):
                    if not re.fullmatch("[0-9]{4}", name):
                        raise ValueError(f'{name}: an iteration id has four digits in quotes, as in "0001"')
                if other != INITIAL and other not in value:
                    raise ValueError(f"iteration {key}: its {role} {other} is not in the chain")
                if other >= key:
                    raise ValueError(f"iteration {key}: its {role} {other} must come before it")
        return value

    @field_validator("rewards")
    @classmethod
    def _distinct_names(cls, value: tuple[RewardConfig, ...]) -> tuple[RewardConfig, ...]:
        names = [reward.name for reward in value]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two components have the name {name}: give each its own")
        if not any(reward.weight for reward in value):
            raise ValueError("every weight is 0, so no completion would have a reward; give a component a weight")
        return value

    @model_validator(mode="after")
    def _addresses_are_of_services(self) -> Self:
        services = {reward.name for reward in self.rewards if isinstance(reward, ServiceReward)}
        for name in self.execution.service_addresses:
            if name not in services:
                raise ValueError(
                    f"execution.service_addresses: no reward with a url has the name {name}; there are "
                    f"{', '.join(sorted(services)) or 'none'}"
                )
        return self

    @model_validator(mode="after")
    def _sections_agree(self) -> Self:
        try:
            check_completions(self.advantages.baseline, self.rollouts.completions_per_prompt)
        except UserError as error:
            raise ValueError(f"rollouts.{error}") from error
        in_all = self.rollouts.prompts_drawn * self.rollouts.completions_per_prompt
        if self.advantages.baseline in ("batch_mean", "global_standardized") and in_all < 2:
            raise ValueError(
                f"advantages.baseline: {self.advantages.baseline} compares a completion with the others of the "
                "iteration, and one prompt with one completion has none; raise rollouts.prompts_per_iteration or "
                "rollouts.completions_per_prompt"
            )
        if not self.logprobs.reference and self.advantages.beta > 0:
            raise ValueError(
                "advantages.beta is above 0 but logprobs.reference is false: the KL penalty needs the reference's "
                "log-probs; set logprobs.reference to true or advantages.beta to 0"
            )
        if self.advantages.groups_without_signal == "resample" and self.rollouts.oversample == 1:
            raise ValueError(
                "advantages.groups_without_signal: resample needs prompts in surplus; set rollouts.oversample above 1, "
                "or drop in place of resample"
            )
        without_signal = self.advantages.groups_without_signal
        if self.rollouts.completions_per_prompt < 2 and without_signal != "keep":
            raise ValueError(
                f"advantages.groups_without_signal: {without_signal} would leave nothing to train on: a group of one "
                "completion never has signal; use keep, or at least 2 rollouts.completions_per_prompt"
            )
        corrected = self.update.sampler_correction != "none"
        if self.advantages.baseline == "best_of_k" and (self.update.several_steps or corrected):
            raise ValueError(
                "advantages.baseline: best_of_k trains on the plain likelihood of the best completions, which a "
                "clipped ratio or a sampler correction would alter; set update.minibatches and update.epochs to 1 and "
                "update.sampler_correction to none"
            )
        ramp, limit = self.advantages.overlong_ramp, self.rollouts.max_tokens
        if ramp is not None and ramp[1] > limit:
            raise ValueError(
                f"advantages.overlong_ramp ends at {ramp[1]} tokens, but rollouts.max_tokens is {limit}: no completion "
                f"gets that long; let it end at {limit} or before"
            )
        return self


def _explain(error: ValidationError, values: Mapping[str, Any], path: Path) -> str:
    lines = []
    errors = error.errors()
    for item in errors:
        if item["type"] == "too_short" and any(_below(other["loc"], item["loc"]) for other in errors):
            continue  # pydantic does not count the wrong items of a list
        where = ".".join(_parts(item["loc"], values)) or "the file as a whole"
        if item["loc"][:1] == ("rewards",):
            where = ".".join(str(part) for part in item["loc"] if part not in KINDS or part == item["loc"][-1])
        if item["type"] == "extra_forbidden":
            lines.append(f"{path}: {where}: there is no such key; check its spelling")
        elif item["loc"][:1] == ("iterations",) and item["type"] == "string_type":
            lines.append(f'{path}: {where}: ids must be in quotes, as in "0001"')
        elif item["type"] == "missing":
            lines.append(f"{path}: {where}: this key is missing; add it")
        else:
            lines.append(f"{path}: {where}: {item['msg'].removeprefix('Value error, ')}")
    return "\n".join(lines)


def _below(location: tuple[int | str, ...], other: tuple[int | str, ...]) -> bool:
    return len(location) > len(other) and location[: len(other)] == other


def _parts(location: Sequence[int | str], values: Any) -> Iterator[str]:
    """The parts of a location, without the number of a dataset that stands alone where a list may stand."""
    for part in location:
        if isinstance(part, int) and isinstance(values, Mapping):
            continue
        yield str(part)
        within = isinstance(part, int) if isinstance(values, list) else isinstance(values, Mapping) and part in values
        values = values[part] if within else None


def parse_params(values: Mapping[str, Any], path: Path = Path("params.yaml")) -> Params:
    """Check the parsed YAML; raises UserError that names each wrong key."""
    try:
        return Params.model_validate(values)
    except ValidationError as error:
        raise UserError(_explain(error, values, path)) from error


def load_params(path: Path) -> Params:
    """Read and check params.yaml; raises UserError that names file, key and what to do."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    if not path.exists():
        raise UserError(f"{path}: no such file; run this in a project's folder, the one with params.yaml")
    try:
        values = YAML(typ="safe").load(path.read_text(encoding="utf-8"))
    except (YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not readable as YAML: {error}") from error
    if not isinstance(values, dict):
        raise UserError(f"{path}: expected sections such as policy and rollouts, found {type(values).__name__}")
    return parse_params(values, path)
