"""Where a stage's output came from: the record beside it, or the kept one of the run that made what is in place."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from rloo_pipeline import fingerprint
from rloo_pipeline.audit.artifacts import (
    SOURCE,
    exists,
    input_path,
    link_of,
    output_fingerprint,
    outputs,
    stored_fingerprint,
)
from rloo_pipeline.audit.recorded import changed, recorded_params
from rloo_pipeline.config import Params
from rloo_pipeline.errors import UserError
from rloo_pipeline.layout import INITIAL, Layout

ROLES = {"policy", "reference", "trainer_state", "opponent", "prompts", "rollouts", "logprobs", "rewards", "advantages"}


class Provenance(BaseModel):
    """What the audit reads of a record; the rest of it is as the stage wrote it."""

    model_config = ConfigDict(frozen=True, strict=True)

    stage: str
    iteration: str
    algorithm_version: int
    inputs: dict[str, str]
    output: str
    seed: int
    settings: dict[str, Any]
    versions: dict[str, str]
    device: str
    execution: dict[str, Any] = {}

    @field_validator("inputs")
    @classmethod
    def _known(cls, inputs: dict[str, str]) -> dict[str, str]:
        unknown = [role for role in inputs if role not in ROLES and not role.startswith(SOURCE)]
        if unknown:
            raise ValueError(f"no stage has an input {unknown[0]!r}")
        return inputs


def read_provenance(layout: Layout, stage: str, iteration: str, params: Params | None = None) -> dict[str, Any] | None:
    """The provenance of the output in place, None if there is no record beside it; UserError if that is not readable.

    DVC restores an older run's output and metrics without its provenance: then it is the one that the stage kept. Of
    several that tell of this output, the one whose inputs are in place and whose settings are those of `params`. A
    record of no run here (pulled, edited) stands if it tells of this output, and any if no other does: compare its
    `output`.
    """
    path = layout.provenance(stage, iteration)
    if not path.exists():
        return None
    beside = _read(path, stage, iteration)
    try:
        found = output_in_place(layout, stage, iteration)
    except UserError:
        return beside
    folder = layout.kept_provenance(stage, iteration)
    if found is None or not folder.exists():
        return beside
    latest_first = sorted(folder.glob(f"{found[:16]}-*.json"), key=lambda item: -item.stat().st_mtime_ns)
    kept = [_read(path, stage, iteration) for path in latest_first]
    if beside["output"] == found and beside not in kept:
        return beside
    fitting = [record for record in (beside, *kept) if record["output"] == found]
    if params is None or (iteration != INITIAL and iteration not in params.iterations):
        return fitting[0] if fitting else beside
    return min(fitting, key=lambda record: _misfits(layout, params, record), default=beside)


def output_in_place(layout: Layout, stage: str, iteration: str) -> str | None:
    """The fingerprint that a stage's outputs state of themselves, None if one is not there; UserError if unreadable."""
    places = outputs(layout, stage, iteration)
    if not all(exists(path) for path in places.values()):
        return None
    return output_fingerprint(stage, {name: stored_fingerprint(path) for name, path in places.items()})


def tells_of_another(layout: Layout, stage: str, iteration: str, recorded: str, found: str) -> str:
    """What is wrong with a record of another output than the one in place, and what mends it."""
    return (
        f"{layout.provenance(stage, iteration)} tells of another output ({recorded[:12]}) than the one in place "
        f"({found[:12]}): DVC may have restored an older run, which leaves the record of a later one; "
        f"{anew(stage, iteration)} makes both anew, or restore both with `git checkout` and `dvc checkout`"
    )


def anew(stage: str, iteration: str) -> str:
    """The command that runs a stage again even where DVC sees nothing to do."""
    target = f"{stage}@{iteration}" if iteration != INITIAL else {"evaluate": "evaluate_initial"}.get(stage, stage)
    return f"`dvc repro -f -s {target}`"


def _read(path: Path, stage: str, iteration: str) -> dict[str, Any]:
    try:
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        told = Provenance.model_validate(record)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "all of it"
        raise UserError(
            f"{path}: not the provenance of a stage: {place}: {first['msg']}; restore it with `git checkout`"
        ) from error
    except ValueError as error:
        raise UserError(f"{path}: not readable as JSON ({error}); restore it with `git checkout`") from error
    if (told.stage, told.iteration) != (stage, iteration):
        raise UserError(f"{path}: is of {told.stage} {told.iteration}; restore it with `git checkout`")
    return record


def _misfits(layout: Layout, params: Params, record: Mapping[str, Any]) -> tuple[int, int]:
    """How many of a record's inputs are not those in place, and how many of its settings are not those of `params`."""
    stage, iteration = record["stage"], record["iteration"]
    link = link_of(params, iteration)
    places = [(input_path(layout, stage, iteration, link, role), made) for role, made in record["inputs"].items()]
    try:
        inputs = sum(_in_place(path) not in (None, made) for path, made in places)
        return inputs, len(changed(params, recorded_params(params, stage, iteration, record), stage))
    except UserError:
        return len(places), len(record["settings"])


def _in_place(path: Path) -> str | None:
    if exists(path) and (path.suffix == ".parquet" or not path.is_file()):
        return stored_fingerprint(path)
    return fingerprint.of_path(path) if path.exists() else None
