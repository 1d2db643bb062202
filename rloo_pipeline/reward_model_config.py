"""How reward models are trained."""

from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, field_validator, model_validator

from rloo_pipeline.data_config import TableConfig
from rloo_pipeline.layout import reward_model_at
from rloo_pipeline.objective.schedule import Schedule
from rloo_pipeline.objective_config import OptimizerConfig

# Stricter than other names: DVC would read a dot as part of a path, and four digits are an iteration.
ModelName = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_-]*$")]


class RewardModelConfig(OptimizerConfig):
    """A reward model trained from preference pairs (Bradley & Terry 1952)."""

    model: str = Field(
        description="Base: hub id, local directory, or package:<python package>/<directory or .gguf file in it>."
    )
    revision: str | None = Field(default=None, description="Branch, tag or commit of a hub base.")
    train: TableConfig = Field(description="Pairs to train on: columns chosen, rejected and, if explicit, prompt.")
    eval: TableConfig = Field(description="Held-out pairs, never trained on; fraction: a share of the train prompts.")
    max_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Longest prompt + completion, tokens; longer pairs are left out; null: what the base can see.",
    )
    batch_size: int = Field(ge=1, description="Pairs of one optimizer step.")
    steps: int | None = Field(default=None, ge=1, description="Optimizer steps; or give epochs.")
    epochs: float | None = Field(default=None, gt=0, description="Times that every pair is trained on; or give steps.")
    schedule: Schedule = Field(default="linear", description="How the rate falls after the warm-up, to 0 at the end.")
    adam_beta2: float = Field(default=0.999, ge=0, lt=1, description="Decay of the second moment.")
    bootstrap_resamples: int = Field(default=2000, ge=100, description="Resamples of pairs for the interval.")

    @field_validator("model")
    @classmethod
    def _no_circle(cls, value: str) -> str:
        if reward_model_at(Path(value)):
            raise ValueError(
                f"{value} is made by this project, and DVC would see a circle; copy the directory to a place of its "
                "own, name the copy and list it under sources"
            )
        return value

    @model_validator(mode="after")
    def _length_is_told_once(self) -> Self:
        if (self.steps is None) == (self.epochs is None):
            raise ValueError("name exactly one of steps and epochs")
        if self.steps is not None and self.warmup_steps >= self.steps:
            raise ValueError(f"warmup_steps ({self.warmup_steps}) must be less than steps ({self.steps})")
        if self.train.fraction is not None:
            raise ValueError("train.fraction: only eval can be a fraction, of the train pairs")
        return self
