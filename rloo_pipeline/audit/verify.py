"""Stages executed again with what made their output, and the outputs compared row by row."""

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from rloo_pipeline import gpu
from rloo_pipeline.audit.artifacts import (
    SOURCE,
    exists,
    input_path,
    link_of,
    outputs,
    stages_of,
    stored_fingerprint,
)
from rloo_pipeline.audit.compare import compare_tables
from rloo_pipeline.audit.provenance import anew, output_in_place, read_provenance, tells_of_another
from rloo_pipeline.audit.recorded import changed, conditions, recorded_params
from rloo_pipeline.audit.replay import Scratch, link, prepare_processes, replay
from rloo_pipeline.audit.verify_report import Outcome, as_json, lines, of_manifest, of_metrics, of_parts, of_table
from rloo_pipeline.config import IterationConfig, Params
from rloo_pipeline.errors import UserError
from rloo_pipeline.layout import INITIAL, REWARD_MODEL, STAGES, Layout, check_iteration, reward_model_at
from rloo_pipeline.process import exclusive
from rloo_pipeline.progress import say
from rloo_pipeline.schema import KEY_NAMES
from rloo_pipeline.shards import read_shards, read_table
from rloo_pipeline.sources import fingerprints
from rloo_pipeline.stages.context import algorithm_version, library_versions

KEY_OF = {"pairs": "pair_id", "steps": "step"}
NOT_HERE = "pruned, or `dvc checkout` restores it (`dvc pull` in a fresh clone)"


class Unchecked(Exception):
    """Something that a replay needs is not there; the message says what."""


def plan(params: Params, iteration: str | None, stage: str | None) -> list[tuple[str, str]]:
    """The stages to replay, in the order of running: (stage, iteration); raises UserError if there is none such."""
    if stage is not None and stage not in (REWARD_MODEL, *STAGES):
        raise UserError(f"--stage {stage}: there is no such stage; it is one of {', '.join((REWARD_MODEL, *STAGES))}")
    if iteration is not None:
        link_of(params, check_iteration(iteration))
    chosen = (*params.reward_models, INITIAL, *params.iterations) if iteration is None else (iteration,)
    pairs = [(name, item) for item in chosen for name in stages_of(item) if stage in (None, name)]
    if not pairs and iteration is None:
        raise UserError(f"--stage {stage}: params.yaml lists no reward model")
    if not pairs:
        raise UserError(
            f"--stage {stage}: iteration {iteration} has no such stage; it has {', '.join(stages_of(chosen[0]))}"
        )
    return pairs


def run(layout: Layout, params: Params, pairs: list[tuple[str, str]], keep: bool) -> Iterator[Outcome]:
    """Replay the stages one after the other; the scratch of each is removed behind it unless `keep`.

    What a killed verify left is removed too: the caller holds the project's lock, so none is at work.
    """
    layout.state.mkdir(parents=True, exist_ok=True)
    for left in layout.state.glob("verify-*"):
        shutil.rmtree(left)
    prepare_processes(params, [stage for stage, _ in pairs])
    directory = Path(tempfile.mkdtemp(prefix="replayed-" if keep else "verify-", dir=layout.state))
    try:
        for stage, iteration in pairs:
            scratch = Scratch(layout.root, directory / f"{stage}-{iteration}")
            yield _verify(layout, params, Outcome(stage, iteration), scratch)
            if not keep:
                shutil.rmtree(scratch.directory, ignore_errors=True)
    finally:
        if keep:
            say(f"replayed artifacts kept in {directory}; remove the directory when done")
        else:
            shutil.rmtree(directory, ignore_errors=True)


def verify(
    layout: Layout, params: Params, iteration: str | None, stage: str | None, *, keep: bool, json_output: bool
) -> bool:
    """Replay, compare and print; returns whether something was checked and all that was is identical.

    Holds the locks that a stage would hold; raises UserError if there is no such stage or iteration.
    """
    pairs = plan(params, iteration, stage)
    on_gpu = any(name in gpu.STAGES for name, _ in pairs)
    outcomes = []
    with exclusive(layout, "verify"), gpu.exclusive(layout, "verify") if on_gpu else nullcontext():
        for outcome in run(layout, params, pairs, keep):
            outcomes.append(outcome)
            if not json_output:
                print("\n".join(lines(outcome)), flush=True)
    statuses = {outcome.status for outcome in outcomes}
    passed = "identical" in statuses and statuses <= {"identical", "unchecked"}
    if json_output:
        print(json.dumps({"passed": passed, "stages": [as_json(outcome) for outcome in outcomes]}, indent=2))
    return passed


def _verify(layout: Layout, params: Params, outcome: Outcome, scratch: Scratch) -> Outcome:
    stage, iteration = outcome.stage, outcome.iteration
    try:
        provenance = _recorded(layout, params, stage, iteration)
        here = {"versions": library_versions(), "algorithm_version": algorithm_version(stage)}
        outcome.conditions = conditions(provenance, here)
        chain = link_of(params, iteration)
        _check_inputs(layout, params, outcome, chain, provenance)
        made_with = recorded_params(params, stage, iteration, provenance)
        outcome.changed = changed(params, made_with, stage)
        link(layout, scratch, _read(layout, stage, iteration, chain, provenance))
        replay(stage, scratch, made_with, iteration)
        outcome.conditions = conditions(provenance, read_provenance(scratch, stage, iteration) or {})
        _compare(layout, scratch, outcome)
    except Unchecked as reason:
        outcome.status, outcome.reason = "unchecked", str(reason)
    except UserError as error:
        outcome.status, outcome.reason = "failed", str(error)
    return outcome


def _recorded(layout: Layout, params: Params, stage: str, iteration: str) -> dict[str, Any]:
    """The provenance of a stage's outputs, all of which are there and those that it tells of."""
    provenance = read_provenance(layout, stage, iteration, params)
    places = outputs(layout, stage, iteration)
    missing = [path for path in places.values() if not exists(path)]
    if provenance is None and missing:
        raise Unchecked(f"{missing[0]} is not there yet; run `dvc repro`")
    if missing:
        raise Unchecked(f"{missing[0]} is not there: {NOT_HERE}")
    path = layout.provenance(stage, iteration)
    if provenance is None:
        raise UserError(f"{path}: no such file, so what made {stage} {iteration} is not known; restore it from git")
    found = output_in_place(layout, stage, iteration)
    if found is not None and found != provenance["output"]:
        raise UserError(tells_of_another(layout, stage, iteration, provenance["output"], found))
    return provenance


def _check_inputs(
    layout: Layout, params: Params, outcome: Outcome, chain: IterationConfig, provenance: Mapping[str, Any]
) -> None:
    """Raise Unchecked if an input is not there, UserError if one is not that which the stage read."""
    stage, iteration = outcome.stage, outcome.iteration
    recorded: Mapping[str, str] = provenance["inputs"]
    read = {name: item for name, item in params.sources.items() if f"{SOURCE}{item.path.as_posix()}" in recorded}
    for path in _needed(layout, stage, iteration, chain, provenance):
        if not exists(path):
            raise Unchecked(f"its input {path} is not there: {NOT_HERE}")
    in_place: dict[str, str] = {}
    for used_by in {source.used_by for source in read.values()}:
        in_place |= fingerprints(read, used_by, layout.root)
    for role, made_from in recorded.items():
        path = input_path(layout, stage, iteration, chain, role)
        now = in_place.get(role) if role.startswith(SOURCE) else stored_fingerprint(path)
        if now != made_from:
            raise UserError(
                f"made from another {path} ({made_from[:12]}) than the one in place ({str(now)[:12]}); "
                f"restore that, or run {anew(stage, iteration)}"
            )


def _needed(
    layout: Layout, stage: str, iteration: str, chain: IterationConfig, provenance: Mapping[str, Any]
) -> list[Path]:
    """The artifacts that the stage reads."""
    roles = [role for role in provenance["inputs"] if not role.startswith(SOURCE) or _is_trained(role)]
    paths = [input_path(layout, stage, iteration, chain, role) for role in roles]
    if stage == "evaluate" and iteration != INITIAL and roles:
        paths.append(layout.evaluation(INITIAL))
    return list(dict.fromkeys(paths))


def _is_trained(role: str) -> bool:
    """Whether a source is a reward model that a stage made."""
    return reward_model_at(Path(role.removeprefix(SOURCE))) is not None


def _read(
    layout: Layout, stage: str, iteration: str, chain: IterationConfig, provenance: Mapping[str, Any]
) -> list[Path]:
    """What the stage may read: its inputs, and what else of the iteration it is checked against."""
    stages = stages_of(iteration)
    earlier = [outputs(layout, name, iteration) for name in stages[: stages.index(stage)]]
    paths = [path for places in earlier for path in places.values() if exists(path)]
    return list(dict.fromkeys([*_needed(layout, stage, iteration, chain, provenance), *paths]))


def _compare(layout: Layout, scratch: Scratch, outcome: Outcome) -> None:
    stage, iteration = outcome.stage, outcome.iteration
    stored, replayed = outputs(layout, stage, iteration), outputs(scratch, stage, iteration)
    for name, place in stored.items():
        if name in ("policy", "trainer_state", "model"):
            outcome.differences += of_parts(name, place, replayed[name])
            continue
        if place.suffix == ".parquet":
            found = compare_tables(read_table(place)[0], read_table(replayed[name])[0], [KEY_OF.get(name, "prompt_id")])
        else:
            found = compare_tables(read_shards(place), read_shards(replayed[name]), KEY_NAMES)
        outcome.rows += found.rows
        outcome.differences += of_table(name, found)
    outcome.differences += of_metrics(_metrics(layout, stage, iteration), _metrics(scratch, stage, iteration))
    outcome.differences = outcome.differences or [
        of_manifest(name) for name in stored if stored_fingerprint(stored[name]) != stored_fingerprint(replayed[name])
    ]
    outcome.status = "differs" if outcome.differences else "identical"


def _metrics(layout: Layout, stage: str, iteration: str) -> Mapping[str, Any]:
    path = layout.metrics(stage, iteration)
    try:
        metrics: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: not readable ({error}); restore it with `git checkout`") from error
    return metrics
