"""The artifacts of one iteration, joined by key."""

from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa

from rloo_pipeline.audit.provenance import read_provenance
from rloo_pipeline.errors import UserError
from rloo_pipeline.fingerprint import MANIFEST
from rloo_pipeline.layout import Layout, check_iteration
from rloo_pipeline.manifest import read_manifest
from rloo_pipeline.progress import say
from rloo_pipeline.rewards.score import join_prompts
from rloo_pipeline.schema import KEY_NAMES
from rloo_pipeline.shards import read_shards, read_table
from rloo_pipeline.stages.advantages import join

ROOT = b"project"


def iterations(root: str | Path = ".") -> list[str]:
    """Ids of the iterations that have rollouts, ascending."""
    found = Layout(Path(root)).rollouts("*")
    return sorted(path.parent.name for path in found.parent.glob(f"{found.name}/{MANIFEST}"))


def load(iteration: str, root: str | Path = ".") -> pa.Table:
    """Rollouts, prompts' columns, log-probs, rewards and advantages of an iteration, one row a completion, key order.

    `reward` is the raw one, `clipped_reward` the advantages' own; units as in schema. What is not there, or was made
    from other inputs than those in place, is left out and the reason said. The schema's metadata names the project.
    Raises UserError if there are no rollouts or if a file is not what its manifest says.
    """
    layout = Layout(Path(root).resolve())
    if not (layout.rollouts(check_iteration(iteration)) / MANIFEST).exists():
        raise UserError(
            f"rollouts {iteration}: {layout.rollouts(iteration)} holds none; there are rollouts of "
            f"{', '.join(iterations(root)) or 'no iteration'}; run `dvc repro rollouts@{iteration}`"
        )
    fingerprints = {"rollouts": str(read_manifest(layout.rollouts(iteration))["fingerprint"])}
    order = [(name, "ascending") for name in KEY_NAMES]
    table = read_shards(layout.rollouts(iteration)).sort_by(order)
    table = _with_prompts(table, layout, iteration, fingerprints)
    for stage, directory in (
        ("logprobs", layout.logprobs(iteration)),
        ("rewards", layout.rewards(iteration)),
        ("advantages", layout.advantages(iteration)),
    ):
        table = _with_stage(table, directory, layout, stage, iteration, fingerprints)
    return table.replace_schema_metadata({ROOT: str(layout.root)})


def _with_prompts(table: pa.Table, layout: Layout, iteration: str, fingerprints: dict[str, str]) -> pa.Table:
    path = layout.prompts / "train.parquet"
    if not path.exists():
        say(f"prompts left out: {path} is not there; run `dvc repro prepare` or `dvc checkout`")
        return table
    prompts, content = read_table(path)
    made_from = _inputs(layout, "rollouts", iteration, fingerprints["rollouts"])
    if made_from.get("prompts", content) != content:
        say(f"prompts left out: {path} is not what rollouts {iteration} were made from; run `dvc repro` again")
        return table
    fingerprints["prompts"] = content
    return join_prompts(table, prompts)


def _with_stage(
    table: pa.Table, directory: Path, layout: Layout, stage: str, iteration: str, fingerprints: dict[str, str]
) -> pa.Table:
    """`table` with a stage's columns, if the stage's output is there and fits what is in `fingerprints`."""
    if not (directory / MANIFEST).exists():
        say(f"{stage} {iteration} left out: not there yet; run `dvc repro {stage}@{iteration}`")
        return table
    manifest = read_manifest(directory)
    fingerprints[stage] = manifest["fingerprint"]
    made_from = {"rollouts": manifest["facts"]["rollouts_fingerprint"]}
    made_from |= _inputs(layout, stage, iteration, manifest["fingerprint"])
    changed = [name for name, now in fingerprints.items() if made_from.get(name, now) != now]
    if changed:
        say(
            f"{stage} {iteration} left out: made from other {' and '.join(changed)} than those in place; "
            f"run `dvc repro {stage}@{iteration}`"
        )
        return table
    part = read_shards(directory)
    if stage == "advantages":
        part = part.rename_columns({"reward": "clipped_reward"})
    return join(table, part)


def _inputs(layout: Layout, stage: str, iteration: str, output: str) -> Mapping[str, str]:
    """Fingerprints of the inputs of a stage's output, if its provenance is there and tells of this very output."""
    provenance = read_provenance(layout, stage, iteration)
    inputs: Mapping[str, str] = provenance["inputs"] if provenance and provenance["output"] == output else {}
    return inputs
