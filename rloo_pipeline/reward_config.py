"""The components of the reward, one model for each kind."""

import re
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Discriminator, Field, Tag, field_validator, model_validator

from rloo_pipeline.section import Dtype, Name, Section

SUFFIXES = ("_std", "_min", "_max", "_null", "_errors", "_clipped")


class RewardBase(Section):
    """What every component has."""

    name: Name = Field(description="Name of the component; its column is reward/<name>.")
    weight: float = Field(default=1.0, description="Weight in the sum; 0: scored and reported, but not rewarded.")
    clip: tuple[float, float] | None = Field(
        default=None, description="Least and greatest score that enters the sum; the column keeps the unclipped score."
    )
    tasks: tuple[str, ...] | None = Field(
        default=None, min_length=1, description="Values of the column task that it applies to; null: to every row."
    )
    on_error: Literal["fail", "invalid"] = Field(
        default="fail",
        description="When a row cannot be scored: stop the stage, or leave the row out (counted, with the reason).",
    )

    @field_validator("name")
    @classmethod
    def _no_metric_suffix(cls, value: str) -> str:
        if value.endswith(SUFFIXES):
            raise ValueError(f"metrics end with {', '.join(SUFFIXES)}; take another name than {value}")
        return value

    @field_validator("clip")
    @classmethod
    def _clip_in_order(cls, value: tuple[float, float] | None) -> tuple[float, float] | None:
        if value is not None and value[0] > value[1]:
            raise ValueError(f"clip [{value[0]}, {value[1]}]: the least comes first")
        return value


class FunctionReward(RewardBase):
    """A Python function, called as TRL calls reward functions."""

    function: str = Field(description="path/file.py:callable or module:callable; sync or async.")
    kwargs: dict[str, Any] = Field(default_factory=dict, description="Further keyword arguments of the function.")
    time_limit: float = Field(default=600.0, gt=0, description="Longest call (a shard, or a single row), seconds.")


class ModelReward(RewardBase):
    """A sequence classification model."""

    model: str = Field(description="Hub id or directory of a sequence classification model.")
    revision: str | None = Field(default=None, description="Branch, tag or commit of a hub model.")
    logit: int | None = Field(default=None, ge=0, description="Which logit is the score; null: the only one.")
    dtype: Dtype = Field(default="float32", description="Precision of the forward pass.")


class JudgeReward(RewardBase):
    """A causal language model that is asked about each completion."""

    judge: str = Field(description="Hub id or directory of a causal language model.")
    revision: str | None = Field(default=None, description="Branch, tag or commit of a hub model.")
    dtype: Dtype = Field(default="float32", description="Precision of the forward pass.")
    prompt: str = Field(description="What the judge is asked: {prompt}, {completion} and {<column>} are filled in.")
    token: str | None = Field(default=None, description="The score is this token's probability to come next.")
    pattern: str | None = Field(
        default=None, description="The score is the number in the first group of this regular expression's first match."
    )
    max_tokens: int = Field(default=16, ge=1, description="Longest answer that pattern is sought in, tokens.")

    @model_validator(mode="after")
    def _can_ask(self) -> Self:
        if "{completion}" not in re.sub(r"\{\{\w+\}\}", "", self.prompt):
            raise ValueError("prompt: {completion} is missing, so every completion would get the same score; add it")
        if (self.token is None) == (self.pattern is None):
            raise ValueError("name exactly one of token and pattern")
        if self.pattern is not None:
            try:
                groups = re.compile(self.pattern).groups
            except re.error as error:
                raise ValueError(f"pattern {self.pattern!r} is not a regular expression: {error}") from error
            if groups != 1:
                raise ValueError(f"pattern {self.pattern!r}: has {groups} groups; put the number alone in parentheses")
        elif "max_tokens" in self.model_fields_set:
            raise ValueError("max_tokens is without effect on token; remove it")
        return self


def _plain_address(value: str) -> str:
    if not re.match(r"https?://[^/?#@\s]+([/?#]|$)", value):
        raise ValueError("write http://host:port/path, without user and password; a token goes in token_env")
    return value


Address = Annotated[str, AfterValidator(_plain_address)]


class ServiceReward(RewardBase):
    """A service that scores over HTTP."""

    url: Address = Field(
        description="Where the service takes POST requests; execution.service_addresses can replace it."
    )
    token_env: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z_][A-Za-z0-9_]*$",
        description="Environment variable with the bearer token; the token itself never stands in a file.",
    )
    time_limit: float = Field(default=60.0, gt=0, description="Longest request, seconds.")


KINDS = {"function": FunctionReward, "model": ModelReward, "judge": JudgeReward, "url": ServiceReward}


def _kind(value: Any) -> str | None:
    given = [key for key in KINDS if (key in value if isinstance(value, dict) else hasattr(value, key))]
    return given[0] if len(given) == 1 else None


RewardConfig = Annotated[
    Annotated[FunctionReward, Tag("function")]
    | Annotated[ModelReward, Tag("model")]
    | Annotated[JudgeReward, Tag("judge")]
    | Annotated[ServiceReward, Tag("url")],
    Discriminator(
        _kind,
        custom_error_type="kind_of_reward",
        custom_error_message="name exactly one of function, model, judge and url",
    ),
]
