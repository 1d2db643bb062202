"""Sharded Parquet: every shard written whole, read in order, checked against its fingerprint; resumable."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rloo_pipeline import fingerprint
from rloo_pipeline.errors import UserError
from rloo_pipeline.files import write_json
from rloo_pipeline.manifest import read_manifest
from rloo_pipeline.progress import say
from rloo_pipeline.schema import SCHEMA_VERSION

_FINGERPRINT = b"fingerprint"


def shard_name(index: int) -> str:
    """File name of the shard at `index`."""
    return f"shard-{index:05d}.parquet"


def write_table(path: Path, table: pa.Table) -> str:
    """Write one Parquet file atomically with its content's fingerprint in its metadata, which is returned."""
    content = fingerprint.of_table(table)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    metadata = {**(table.schema.metadata or {}), _FINGERPRINT: content.encode()}
    try:
        pq.write_table(table.replace_schema_metadata(metadata), temporary, compression="zstd")
    except pa.ArrowNotImplementedError as error:
        temporary.unlink(missing_ok=True)
        raise UserError(f"{path}: a column has a type that Parquet cannot hold ({error}); change or drop it") from error
    temporary.replace(path)
    return content


def read_table(path: Path) -> tuple[pa.Table, str]:
    """Read one Parquet file and its fingerprint; raises UserError if it is missing, broken or altered."""
    try:
        table = pq.read_table(path, partitioning=None)
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such file; run the stage that makes it") from error
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path}: not readable as Parquet ({error}); remove it and run the stage again") from error
    content = fingerprint.of_table(table)
    if (table.schema.metadata or {}).get(_FINGERPRINT, b"").decode() != content:
        raise UserError(f"{path}: its content is not what was written; remove it and run the stage again")
    return table, content


Entry = tuple[str, int, str]  # file, rows, fingerprint


def write_shards(work: Path, count: int, make: Callable[[int], pa.Table], schema: pa.Schema) -> list[Entry]:
    """Make the shards 0 .. count-1 that `work` does not hold intact yet."""
    entries = []
    for index in range(count):
        path = work / shard_name(index)
        entry = _finished(path)
        if entry is None:
            table = make(index).cast(schema)
            entry = (path.name, table.num_rows, write_table(path, table))
        else:
            say(f"{path.name} is there from an interrupted run: kept")
        entries.append(entry)
    return entries


def _finished(path: Path) -> Entry | None:
    if not path.exists():
        return None
    try:
        table, content = read_table(path)
    except UserError as error:
        say(f"left over from an interrupted run, made again: {error}")
        return None
    return path.name, table.num_rows, content


def write_shards_manifest(work: Path, entries: Sequence[Entry], facts: Mapping[str, Any]) -> str:
    """Write the manifest beside the shards: what they hold, nothing of when or where; returns its fingerprint."""
    shards = [{"file": file, "rows": rows, "fingerprint": content} for file, rows, content in entries]
    whole = fingerprint.of_json({"shards": shards, "facts": dict(facts)})
    write_json(
        work / fingerprint.MANIFEST,
        {
            "schema_version": SCHEMA_VERSION,
            "rows": sum(rows for _, rows, _ in entries),
            "shards": shards,
            "facts": dict(facts),
            "fingerprint": whole,
        },
    )
    return whole


def read_shards(directory: Path, columns: Sequence[str] | None = None) -> pa.Table:
    """All rows of an artifact in order, each shard checked against the manifest; raises UserError if one differs."""
    manifest = read_manifest(directory)
    tables = []
    for entry in manifest["shards"]:
        table, content = read_table(directory / entry["file"])
        if content != entry["fingerprint"]:
            raise UserError(
                f"{directory / entry['file']}: its content is not what {directory / fingerprint.MANIFEST} says; "
                "restore it with `dvc checkout` or run the stage again"
            )
        tables.append(table.replace_schema_metadata(None).select(list(columns) if columns else table.column_names))
    return pa.concat_tables(tables)
