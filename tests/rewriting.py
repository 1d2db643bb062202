"""Artifacts put in the place of others with every fingerprint of their own right: what no check of one file finds."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from safetensors.numpy import load_file, save_file

from rloo_pipeline import fingerprint
from rloo_pipeline.manifest import read_manifest, write_model_manifest
from rloo_pipeline.shards import write_shards, write_shards_manifest


def stored(root: Path, stage: str, iteration: str) -> pa.Table:
    """The rows of an artifact, read without the package."""
    files = sorted((root / "artifacts" / stage / iteration).glob("*.parquet"))
    return pa.concat_tables([pq.read_table(file, partitioning=None) for file in files])


def rewrite_table(root: Path, stage: str, iteration: str, table: pa.Table, *, recorded: bool = True) -> None:
    """Put a table in an artifact's place as the stage would write it, and tell so in its provenance if `recorded`."""
    directory = root / "artifacts" / stage / iteration
    facts = read_manifest(directory)["facts"]
    shutil.rmtree(directory)
    whole = write_shards_manifest(directory, write_shards(directory, 1, lambda _: table, table.schema), facts)
    if recorded:
        edit_json(root / "provenance" / stage / f"{iteration}.json", output=whole)


def replaced(table: pa.Table, column: str, row: int, change: Callable[[Any], Any]) -> pa.Table:
    """The table with one value changed."""
    values = table[column].to_pylist()
    values[row] = change(values[row])
    field = table.schema.field(column)
    return table.set_column(table.column_names.index(column), field, pa.array(values, field.type))


def rewrite_weight(root: Path, iteration: str, tensor: str, change: float) -> None:
    """Add `change` to the first number of a tensor of a policy, manifest and provenance as the stage would write."""
    policy = root / "artifacts" / "policy" / iteration
    path = policy / "model" / "model.safetensors"
    tensors = {name: value.copy() for name, value in load_file(path).items()}
    tensors[tensor].flat[0] += change
    path.unlink()
    save_file(tensors, path, metadata={"format": "pt"})
    facts = read_manifest(policy / "model")["facts"]
    (policy / "model" / "manifest.json").unlink()
    written = write_model_manifest(policy / "model", **facts)
    (policy / "trainer_state" / "manifest.json").unlink()
    state = write_model_manifest(policy / "trainer_state", policy_fingerprint=written)
    edit_json(root / "provenance" / "update" / f"{iteration}.json", output=fingerprint.of_json([written, state]))


def edit_json(path: Path, **values: Any) -> None:
    """Replace keys of a JSON file."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
