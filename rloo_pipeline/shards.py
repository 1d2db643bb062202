"""Sharded Parquet: every shard written whole, read in order, checked against its fingerprint; resumable."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rloo_pipeline import fingerprint
from rloo_pipeline.errors import UserError
from rloo_pipeline.files import write_whole
from rloo_pipeline.manifest import RESTORE, read_manifest, write_manifest
from rloo_pipeline.progress import say

_FINGERPRINT = b"fingerprint"
_INDEX = b"shard"


def shard_name(index: int) -> str:
    """File name of the shard at `index`."""
    return f"shard-{index:05d}.parquet"


def write_table(path: Path, table: pa.Table, index: int = 0) -> str:
    """Write one Parquet file atomically with its content's fingerprint in its metadata, which is returned.

    index: which shard it is, in the metadata too, so that one shard is not taken for another.
    """
    content = fingerprint.of_table(table)
    try:
        encoded = _encoded(table, content, index)
    except pa.ArrowNotImplementedError as error:
        raise UserError(f"{path}: a column has a type that Parquet cannot hold ({error}); change or drop it") from error
    write_whole(path, encoded)
    return content


def _encoded(table: pa.Table, content: str, index: int) -> bytes:
    metadata = {**(table.schema.metadata or {}), _FINGERPRINT: content.encode(), _INDEX: str(index).encode()}
    sink = pa.BufferOutputStream()
    # In one chunk, so that equal tables give equal bytes.
    pq.write_table(table.replace_schema_metadata(metadata).combine_chunks(), sink, compression="zstd")
    encoded: bytes = sink.getvalue().to_pybytes()
    return encoded


def read_table(path: Path, sha256: str | None = None) -> tuple[pa.Table, str]:
    """Read one Parquet file and its fingerprint; raises UserError if it is missing, broken or altered.

    sha256: that of the file's bytes, by default what a manifest beside the file tells, if there is one.
    """
    sha256 = sha256 or _recorded(path)
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such file; run the stage that makes it") from error
    if sha256 is not None and hashlib.sha256(data).hexdigest() != sha256:
        raise UserError(f"{path}: its bytes are not those that were written; {RESTORE}")
    try:
        table = pq.read_table(pa.BufferReader(data))
        content = fingerprint.of_table(table)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise UserError(f"{path}: not readable as Parquet ({error}); {RESTORE}") from error
    if (table.schema.metadata or {}).get(_FINGERPRINT) != content.encode():
        raise UserError(f"{path}: its content is not what was written; {RESTORE}")
    return table, content


def _recorded(path: Path) -> str | None:
    if not path.with_name(fingerprint.MANIFEST).exists():
        return None
    found: str | None = read_manifest(path.parent)["files"].get(path.name)
    return found


Entry = tuple[str, int, str]  # file, rows, fingerprint


def write_shards(work: Path, count: int, make: Callable[[int], pa.Table], schema: pa.Schema) -> list[Entry]:
    """Make the shards 0 .. count-1 that `work` does not hold intact yet."""
    entries = []
    for index in range(count):
        path = work / shard_name(index)
        entry = _finished(path, index, schema)
        if entry is None:
            table = make(index).cast(schema)
            entry = (path.name, table.num_rows, write_table(path, table, index))
        else:
            say(f"{path.name} is there from an interrupted run: kept")
        entries.append(entry)
    return entries


def _finished(path: Path, index: int, schema: pa.Schema) -> Entry | None:
    """The entry of a shard that is there already, if it is to the byte what would be written; None otherwise."""
    if not path.exists():
        return None
    try:
        table, content = read_table(path)
    except UserError as error:
        say(f"left over from an interrupted run, made again: {error}")
        return None
    if table.schema.names != schema.names or path.read_bytes() != _encoded(table.cast(schema), content, index):
        say(f"{path.name} is left over from an interrupted run and not as it would be written: made again")
        return None
    return path.name, table.num_rows, content


def write_shards_manifest(work: Path, entries: Sequence[Entry], facts: Mapping[str, Any]) -> str:
    """Write the manifest beside the shards: what they hold, nothing of when or where; returns its fingerprint.

    The fingerprint is of the rows and facts; the hashes of the files find a damage that no row shows.
    """
    shards = [{"file": file, "rows": rows, "fingerprint": content} for file, rows, content in entries]
    whole = fingerprint.of_json({"shards": shards, "facts": dict(facts)})
    write_manifest(
        work,
        rows=sum(rows for _, rows, _ in entries),
        shards=shards,
        files={file: fingerprint.of_file(work / file) for file, _, _ in entries},
        facts=dict(facts),
        fingerprint=whole,
    )
    return whole


def read_shard(directory: Path, manifest: Mapping[str, Any], index: int) -> pa.Table:
    """The shard at `index` of an artifact; raises UserError if it is not what the artifact's manifest says."""
    entry = manifest["shards"][index]
    path = directory / entry["file"]
    table, content = read_table(path, manifest["files"][entry["file"]])
    if content != entry["fingerprint"]:
        raise UserError(f"{path}: its content is not what {directory / fingerprint.MANIFEST} says; {RESTORE}")
    return table


def read_shards(directory: Path, columns: Sequence[str] | None = None) -> pa.Table:
    """All rows of an artifact in order, each shard checked against the manifest; raises UserError if one differs."""
    manifest = read_manifest(directory)
    tables = []
    for index in range(len(manifest["shards"])):
        table = read_shard(directory, manifest, index).replace_schema_metadata(None)
        tables.append(table.select(list(columns) if columns else table.column_names))
    return pa.concat_tables(tables)
