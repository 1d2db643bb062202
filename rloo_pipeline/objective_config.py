"""The sections of params.yaml that choose the estimator: advantages and update."""

from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from rloo_pipeline.objective.schedule import Schedule
from rloo_pipeline.section import Dtype, Section

BaselineName = Literal[
    "leave_one_out",
    "none",
    "moving_average",
    "batch_mean",
    "group_mean",
    "group_standardized",
    "global_standardized",
    "best_of_k",
]


class AdvantagesConfig(Section):
    """Which completions are trained on, and with what weight."""

    baseline: BaselineName = Field(
        default="leave_one_out",
        description="What is subtracted from a completion's reward. group_standardized blows up any difference: with "
        "the KL in the reward, a group of equal rewards is trained on the noise of its KL; then set kl_in: loss or "
        "groups_without_signal: drop.",
    )
    normalize: bool = Field(
        default=False, description="Whether advantages are centred and divided by their deviation over the iteration."
    )
    beta: float = Field(
        default=0.0, ge=0, description="Weight of the KL penalty, reward units per nat (see kl_normalization)."
    )
    kl_in: Literal["reward", "loss"] = Field(
        default="reward", description="Where the KL penalty stands: taken off the reward, or a term of update's loss."
    )
    kl_estimator: Literal["k1", "k2", "k3", "abs"] = Field(
        default="k1", description="Estimate of a token's KL from its log-probs; k1: their difference."
    )
    kl_normalization: Literal["none", "length"] = Field(
        default="none", description="none: KL of the whole completion; length: divided by its tokens."
    )
    target_kl: float | None = Field(
        default=None,
        gt=0,
        description="Mean KL per completion that beta is adapted to from iteration to iteration, in the unit of "
        "kl_normalization: none, nats per completion; length, nats per token. beta is then the first iteration's. "
        "null: beta stays.",
    )
    reward_clip_range: tuple[float, float] | None = Field(
        default=None, description="Lowest and highest reward, the rest is clipped, before penalties; null: no clipping."
    )
    truncated: Literal["keep", "mask", "penalize"] = Field(
        default="keep",
        description="Completions cut at max_tokens: keep; mask: out of loss, baseline and denominator; penalize: as "
        "the next three say.",
    )
    missing_eos_penalty: float | None = Field(
        default=None, gt=0, description="For penalize: taken off the reward of a completion without EOS; null: nothing."
    )
    overlong_ramp: tuple[int, int] | None = Field(
        default=None,
        description="For penalize: tokens at which the penalty for length begins, and those at which it is whole; "
        "null: none.",
    )
    overlong_penalty: float = Field(
        default=1.0, gt=0, description="For penalize: taken off the reward at the end of overlong_ramp."
    )
    groups_without_signal: Literal["keep", "drop", "resample"] = Field(
        default="keep",
        description="Groups of equal rewards (less a penalty, before the KL): keep; drop; resample: the first "
        "prompts_per_iteration groups with signal are trained on, of the prompts that rollouts.oversample drew.",
    )

    @field_validator("reward_clip_range")
    @classmethod
    def _ordered(cls, value: tuple[float, float] | None) -> tuple[float, float] | None:
        if value is not None and value[0] >= value[1]:
            raise ValueError("the lowest must be less than the highest")
        return value

    @field_validator("overlong_ramp")
    @classmethod
    def _rising(cls, value: tuple[int, int] | None) -> tuple[int, int] | None:
        if value is not None and not 0 <= value[0] < value[1]:
            raise ValueError("it must begin at 0 tokens or more and end after its beginning")
        return value

    @model_validator(mode="after")
    def _settings_agree(self) -> Self:
        penalties = self.missing_eos_penalty, self.overlong_ramp
        if self.truncated == "penalize" and penalties == (None, None):
            raise ValueError("truncated: penalize needs missing_eos_penalty, overlong_ramp or both")
        if self.truncated != "penalize" and penalties != (None, None):
            raise ValueError(
                f"missing_eos_penalty and overlong_ramp have no effect with truncated: {self.truncated}; set penalize"
            )
        if self.target_kl is not None and self.beta == 0:
            raise ValueError("target_kl adapts beta by a factor, and a beta of 0 stays 0; set beta above 0")
        if self.normalize and self.baseline == "best_of_k":
            raise ValueError("normalize makes every advantage of best_of_k 0; set it to false")
        return self


class OptimizerConfig(Section):
    """How AdamW steps."""

    learning_rate: float = Field(ge=0, description="Peak learning rate.")
    warmup_steps: int = Field(default=0, ge=0, description="Steps over which the rate rises linearly to its peak.")
    schedule: Schedule = Field(default="constant", description="How the rate falls after the warm-up.")
    max_grad_norm: float | None = Field(default=1.0, gt=0, description="Gradient norm clipped to; null: off.")
    weight_decay: float = Field(default=0.0, ge=0, description="Decoupled weight decay of matrices.")
    adam_beta1: float = Field(default=0.9, ge=0, lt=1, description="Decay of the first moment.")
    adam_beta2: float = Field(default=0.95, ge=0, lt=1, description="Decay of the second moment.")
    adam_epsilon: float = Field(default=1e-8, gt=0, description="Added to the root of the second moment.")
    dtype: Dtype = Field(default="float32", description="Precision of the passes; master weights are float32.")


class UpdateConfig(OptimizerConfig):
    """How AdamW steps on the trained completions; by default one strictly on-policy step."""

    schedule_steps: int | None = Field(
        default=None, ge=1, description="Step at which a linear or cosine schedule reaches 0; null for constant."
    )
    sampler_tolerance: float = Field(
        default=1e-2,
        gt=0,
        description="Largest gap per token between sampler and recomputed log-probs in float32, nats.",
    )
    sampler_warning: float = Field(
        default=0.1,
        gt=0,
        description="Mean gap per token above which there is a warning, nats; bfloat16 makes 0.04.",
    )
    minibatches: int = Field(default=1, ge=1, description="Optimizer steps that the completions are divided among.")
    epochs: int = Field(default=1, ge=1, description="Times that every completion is trained on.")
    ratio_level: Literal["sequence", "token"] = Field(
        default="sequence", description="With several steps: what has an importance ratio, to the policy at the start."
    )
    epsilon: float = Field(
        default=0.2, gt=0, lt=1, description="With several steps: the ratio is clipped at 1 - epsilon."
    )
    epsilon_high: float | None = Field(
        default=None, gt=0, description="With several steps: and at 1 + epsilon_high; null: the same as epsilon."
    )
    sampler_correction: Literal["none", "truncate", "mask"] = Field(
        default="none",
        description="Importance weight recomputed / sampler probability; truncate: at most the cap; mask: 0 above it.",
    )
    sampler_correction_level: Literal["sequence", "token"] = Field(
        default="sequence", description="What has a weight: the whole completion or each token."
    )
    sampler_correction_cap: float = Field(default=2.0, ge=1, description="Largest weight.")
    loss_normalization: Literal["sequence", "token", "constant"] = Field(
        default="sequence",
        description="A step's loss is divided by its completions, their tokens, or completions * constant_length.",
    )
    constant_length: int | None = Field(
        default=None, ge=1, description="For loss_normalization constant: the length, tokens."
    )

    @property
    def several_steps(self) -> bool:
        """Whether a completion can meet a policy that is no longer the one it was sampled from."""
        return self.minibatches * self.epochs > 1

    @model_validator(mode="after")
    def _schedule_has_its_end(self) -> Self:
        if self.schedule != "constant":
            if self.schedule_steps is None:
                raise ValueError(f"schedule {self.schedule} needs schedule_steps, the step at which the rate is 0")
            if self.schedule_steps <= self.warmup_steps:
                raise ValueError("schedule_steps must be more than warmup_steps")
        return self

    @model_validator(mode="after")
    def _loss_is_defined(self) -> Self:
        if (self.loss_normalization == "constant") != (self.constant_length is not None):
            raise ValueError("loss_normalization: constant and constant_length need each other")
        by_token = self.sampler_correction != "none" and self.sampler_correction_level == "token"
        if by_token and self.several_steps and self.ratio_level == "sequence":
            raise ValueError(
                "sampler_correction_level: token needs ratio_level: token when there are several steps, since a "
                "completion's ratio has no tokens to weigh; set both to the same level"
            )
        return self
