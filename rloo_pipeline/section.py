"""What the sections of params.yaml have in common."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Dtype = Literal["float32", "bfloat16"]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]+$")]


class Section(BaseModel):
    """Base of every section."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
