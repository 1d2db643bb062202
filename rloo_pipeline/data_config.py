"""Where rows come from: prompts, and preference pairs for reward models."""

from math import isfinite
from pathlib import Path
from typing import Any, Self

from pydantic import Field, field_validator, model_validator

from rloo_pipeline.section import Section

Scalar = str | int | float | bool


class TableConfig(Section):
    """A table of the user's own: exactly one of file, hub and generator."""

    file: Path | None = Field(default=None, description="A .jsonl, .csv or .parquet file.")
    hub: str | None = Field(default=None, description="Id of a dataset on the hub.")
    name: str | None = Field(default=None, description="Configuration name of the hub dataset.")
    split: str | None = Field(default=None, description="Split of the hub dataset.")
    revision: str | None = Field(default=None, description="Branch, tag or commit of the hub dataset.")
    generator: str | None = Field(
        default=None, description="path/file.py:callable or module:callable that returns a list of rows."
    )
    kwargs: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments of the generator.")
    fraction: float | None = Field(
        default=None, gt=0, lt=1, description="For eval alone: share of the train rows that is held out instead."
    )
    columns: dict[str, str] = Field(
        default_factory=dict, description="New name of a column to the name that it has in the dataset."
    )
    where: dict[str, Scalar | list[Scalar]] = Field(
        default_factory=dict, description="Column to the value, or the list of values, of the rows that are kept."
    )
    filter: str | None = Field(
        default=None, description="path/file.py:callable or module:callable: keeps the rows (dicts) it is true of."
    )

    @field_validator("where", mode="before")
    @classmethod
    def _comparable(cls, value: Any) -> Any:
        for name, wanted in value.items() if isinstance(value, dict) else ():
            values = wanted if isinstance(wanted, list) else [wanted]
            plain = all(isinstance(item, Scalar) and (not isinstance(item, float) or isfinite(item)) for item in values)
            if not values or not plain:
                raise ValueError(
                    f"{name}: write text, a number, true or false, or a list of such (a date is text, in quotes); "
                    "for anything else use filter"
                )
        return value

    @model_validator(mode="after")
    def _exactly_one_origin(self) -> Self:
        origins = {"file": self.file, "hub": self.hub, "generator": self.generator, "fraction": self.fraction}
        given = [key for key, value in origins.items() if value is not None]
        if len(given) != 1:
            raise ValueError(f"name exactly one of {', '.join(origins)}; given: {', '.join(given) or 'none'}")
        if self.hub is not None and self.split is None:
            raise ValueError("a hub dataset needs its split, as in split: train")
        of_hub = {"name": self.name, "split": self.split, "revision": self.revision}
        idle = [key for key, value in of_hub.items() if value is not None and self.hub is None]
        idle += ["kwargs"] if self.kwargs and self.generator is None else []
        if self.fraction is not None:
            idle += [key for key in ("columns", "where", "filter") if getattr(self, key)]
        if idle:
            raise ValueError(f"{', '.join(idle)}: without effect on {given[0]}; remove it")
        return self


class DatasetConfig(TableConfig):
    """Prompts from one table."""

    system_column: str | None = Field(
        default=None, description="Column with the system message of each row; null cells take system_prompt."
    )
    task: str | None = Field(
        default=None, description="Value of the column task for all rows, which routes rewards; null: as in the table."
    )
    weight: float | None = Field(
        default=None, gt=0, description="Share of each iteration's prompts, relative to the other datasets' weights."
    )

    @model_validator(mode="after")
    def _fraction_has_no_rows(self) -> Self:
        idle = [key for key in ("system_column", "task") if getattr(self, key) is not None]
        if self.fraction is not None and idle:
            raise ValueError(f"{', '.join(idle)}: without effect on fraction; remove it")
        return self


class PromptsConfig(Section):
    """Prompts to train on and held-out prompts to evaluate on."""

    train: tuple[DatasetConfig, ...] = Field(min_length=1, description="Prompts to train on: a dataset, or a list.")
    eval: tuple[DatasetConfig, ...] = Field(
        min_length=1, description="Held-out prompts, never trained on: a dataset, or a list."
    )
    prompt_column: str = Field(default="prompt", description="Column with the prompt: a string or messages.")
    images_column: str | None = Field(
        default=None, description="Column with the images of each prompt, for vision-language policies."
    )
    system_prompt: str | None = Field(
        default=None, description="System message put before every prompt (which makes it conversational)."
    )
    max_prompt_tokens: int | None = Field(
        default=None, ge=1, description="Longest prompt kept, tokens; null: what the policy's context allows."
    )

    @field_validator("train", "eval", mode="before")
    @classmethod
    def _one_or_several(cls, value: Any) -> Any:
        if isinstance(value, dict | DatasetConfig):
            return (value,)
        if not isinstance(value, list | tuple):
            raise ValueError("write a dataset, or a list of datasets")
        return value

    @property
    def eval_fraction(self) -> float | None:
        """Share of the train rows that is held out, if eval has no rows of its own."""
        return self.eval[0].fraction

    @model_validator(mode="after")
    def _datasets_agree(self) -> Self:
        if any(dataset.fraction is not None for dataset in self.train):
            raise ValueError("train.fraction: only eval can be a fraction, of the train rows")
        if len(self.eval) > 1 and any(dataset.fraction is not None for dataset in self.eval):
            raise ValueError("eval: a fraction of the train rows stands alone; remove the other datasets or it")
        if any(dataset.weight is not None for dataset in self.eval):
            raise ValueError("eval: weight is without effect, every held-out prompt is evaluated; remove it")
        weighted = [dataset.weight is not None for dataset in self.train]
        if any(weighted) and (len(weighted) == 1 or not all(weighted)):
            raise ValueError("train: give a weight to each of several datasets, or to none (all rows alike)")
        return self
