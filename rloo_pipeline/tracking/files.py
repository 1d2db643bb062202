"""What the files of a project say, in MLflow's terms. No store is asked here."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rloo_pipeline.config import Params
from rloo_pipeline.fingerprint import MANIFEST
from rloo_pipeline.layout import INITIAL, REWARD_MODEL, STAGES, Layout
from rloo_pipeline.tracking.outdated import md5_of, outdated_records, prompts_fingerprint, read_json
from rloo_pipeline.tracking.secrets import hide

LONGEST_PARAM = 6000  # what MLflow stores of one value


@dataclass(frozen=True)
class Point:
    """One value of one metric; a measured one (a duration, a share of the GPU) differs from run to run."""

    key: str
    step: int
    value: float
    timestamp: int  # milliseconds since 1970
    measured: bool


@dataclass(frozen=True)
class Checkpoint:
    """The policy that an iteration ends with."""

    iteration: str
    path: str
    fingerprint: str


@dataclass(frozen=True)
class PromptSet:
    """The prompts of a split."""

    split: str
    path: str
    fingerprint: str


@dataclass(frozen=True)
class Contents:
    """Everything of a project that is tracked."""

    params: Mapping[str, str]
    points: tuple[Point, ...]
    not_finite: tuple[str, ...]
    checkpoints: tuple[Checkpoint, ...]
    prompt_sets: tuple[PromptSet, ...]
    hashes: Mapping[str, str]  # md5 of each metrics file, as dvc.lock has it
    complete: bool


def read_contents(layout: Layout, params: Params, lock: Mapping[str, Any]) -> Contents:
    """Read the project with its parsed dvc.lock; records made from something that has changed since are left out."""
    outdated = outdated_records(layout, params, lock)
    steps = [(REWARD_MODEL, name) for name in params.reward_models]
    steps += [(stage, iteration) for iteration in (INITIAL, *params.iterations) for stage in STAGES]
    records = [record for record in steps if record not in outdated and layout.metrics(*record).exists()]
    points: list[Point] = []
    not_finite: list[str] = []
    for stage, iteration in records:
        for key, value, path, measured in _values(layout, stage, iteration):
            if isinstance(value, int | float):
                stamp = path.stat().st_mtime_ns // 1_000_000
                step = 0 if stage == REWARD_MODEL else int(iteration)
                points.append(Point(metric_key(key), step, float(value), stamp, measured))
            else:
                not_finite.append(f"{key} of {iteration}: {value}")
    ends = {(stage, iteration) for stage in ("update", "evaluate") for iteration in params.iterations}
    return Contents(
        flat_params(params),
        tuple(points),
        tuple(not_finite),
        tuple(_checkpoints(layout, records)),
        tuple(_prompt_sets(layout)),
        _hashes(layout, records),
        complete=bool(ends) and ends <= set(records),
    )


def _values(layout: Layout, stage: str, iteration: str) -> Iterator[tuple[str, Any, Path, bool]]:
    """(key, value, file, measured) of each metric, timing and system metric of a stage, or of a reward model."""
    path = layout.metrics(stage, iteration)
    prefix = f"{stage}/{iteration}" if stage == REWARD_MODEL else stage
    not_finite = read_json(layout.provenance(stage, iteration)).get("not_finite", {})
    for name, value in read_json(path).items():
        told = not_finite.get(name, "not finite") if value is None else value
        yield f"{prefix}/{name}", told, path, False
    path = layout.timings(stage, iteration)
    timings = read_json(path)
    for name, value in timings.pop("system", {}).items():
        yield f"system/{prefix}/{name}", value, path, True
    for name, value in timings.items():
        yield f"timings/{prefix}/{name}", value, path, True


def metric_key(key: str) -> str:
    """The key as MLflow accepts it: pass@4 becomes pass_at_4."""
    return re.sub(r"[^\w./: -]", "_", key.replace("@", "_at_"))


def flat_params(params: Params) -> dict[str, str]:
    """Every parameter by its dotted path, reward components by their names, secrets hidden."""
    values = params.model_dump(mode="json")
    values["rewards"] = {item.pop("name"): item for item in values["rewards"]}
    return {key: hide(key, value)[:LONGEST_PARAM] for key, value in _flat("", values)}


def _flat(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value and not path.endswith(".kwargs"):
        for key, item in value.items():
            yield from _flat(f"{path}.{key}" if path else key, item)
    else:
        yield path, value


def _checkpoints(layout: Layout, records: list[tuple[str, str]]) -> Iterator[Checkpoint]:
    """The policies of the records; the evaluation knows the fingerprint of one whose weights are elsewhere."""
    for stage, iteration in records:
        if stage in ("prepare", "update"):
            path = layout.model(iteration)
            fingerprint = read_json(path / MANIFEST).get("fingerprint")
            if fingerprint is None:
                fingerprint = read_json(layout.provenance("evaluate", iteration)).get("inputs", {}).get("policy")
            if fingerprint is not None:
                yield Checkpoint(iteration, path.relative_to(layout.root).as_posix(), fingerprint)


def _prompt_sets(layout: Layout) -> Iterator[PromptSet]:
    for split in ("train", "eval"):
        path = layout.prompts / f"{split}.parquet"
        fingerprint = prompts_fingerprint(path)
        if fingerprint is not None:
            yield PromptSet(split, path.relative_to(layout.root).as_posix(), fingerprint)


def _hashes(layout: Layout, records: list[tuple[str, str]]) -> dict[str, str]:
    paths = [layout.metrics(*record) for record in records]
    return {path.relative_to(layout.root).as_posix(): md5_of(path) or "" for path in paths}
