"""Fingerprints of logical content: equal content gives an equal fingerprint, whatever the file's encoding."""

import hashlib
import json
import mmap
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rloo_pipeline.errors import UserError

MANIFEST = "manifest.json"


def of_json(value: Any) -> str:
    """SHA-256 of a JSON value with sorted keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, ensure_ascii=False).encode()).hexdigest()


def of_file(path: Path) -> str:
    """SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def of_path(path: Path) -> str:
    """SHA-256 of a file, or of the names and contents of all files below a directory."""
    if path.is_file():
        return of_file(path)
    files = sorted(item for item in path.rglob("*") if item.is_file() and "__pycache__" not in item.parts)
    return of_json({item.relative_to(path).as_posix(): of_file(item) for item in files})


def of_table(table: pa.Table) -> str:
    """SHA-256 of a table's column names, types and values; chunking and what lies under nulls do not count."""
    digest = hashlib.sha256()
    for name, column in zip(table.column_names, table.columns, strict=True):
        digest.update(name.encode() + b"\0")
        _hash_array(digest, pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type))
    return digest.hexdigest()


def _hash_array(digest: "hashlib._Hash", array: pa.Array) -> None:
    kind = array.type
    # Child fields of lists are named otherwise before and after a Parquet file, so the kind of the list alone counts.
    nested = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    tag = "list" if nested else f"struct {kind.names}" if pa.types.is_struct(kind) else str(kind)
    digest.update(f"{tag} {len(array)}\0".encode())
    if len(array) == 0:
        return
    if array.null_count:
        digest.update(array.is_valid().cast(pa.uint8()).to_numpy(zero_copy_only=False).tobytes())
    if nested:
        digest.update(pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False).tobytes())
        _hash_array(digest, array.flatten())
    elif pa.types.is_struct(kind):
        for child in array.flatten():
            _hash_array(digest, child)
    elif pa.types.is_string(kind) or pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        filled = pc.fill_null(array.cast(pa.large_binary()), b"")
        _, offset_buffer, data = filled.buffers()
        offsets = np.frombuffer(offset_buffer, np.int64)[filled.offset : filled.offset + len(filled) + 1]
        digest.update(np.diff(offsets).tobytes())
        digest.update(memoryview(data or b"")[offsets[0] : offsets[-1]])
    elif pa.types.is_boolean(kind):
        digest.update(pc.fill_null(array, False).cast(pa.uint8()).to_numpy(zero_copy_only=False).tobytes())
    elif pa.types.is_integer(kind) or pa.types.is_floating(kind):
        digest.update(pc.fill_null(array, 0).to_numpy(zero_copy_only=False).tobytes())
    else:
        digest.update(repr(array.to_pylist()).encode())


def of_tensors(files: Iterable[Path]) -> dict[str, str]:
    """For each tensor in the safetensors files: its dtype, shape and SHA-256, by sorted name.

    Reads through memory maps in threads, so it runs at the speed of memory once the file is cached.
    """
    tensors: dict[str, str] = {}
    for path in sorted(files):
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            size = int.from_bytes(data[:8], "little")
            header = _header(path, data[8 : 8 + size], len(data) - 8 - size)
            header.pop("__metadata__", None)
            with memoryview(data)[8 + size :] as body, ThreadPoolExecutor() as pool:

                def describe(item: Mapping[str, Any], body: memoryview = body) -> str:
                    start, end = item["data_offsets"]
                    with body[start:end] as part:
                        return f"{item['dtype']} {item['shape']} {hashlib.sha256(part).hexdigest()}"

                tensors.update(zip(header, pool.map(describe, header.values()), strict=True))
    return dict(sorted(tensors.items()))


def _header(path: Path, text: bytes, room: int) -> dict[str, Any]:
    """The header of a safetensors file with `room` bytes of tensors; raises UserError if it is not whole."""
    try:
        header: dict[str, Any] = json.loads(text)
        end = max((item["data_offsets"][1] for key, item in header.items() if key != "__metadata__"), default=0)
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: not a safetensors file ({error}); restore it or write it anew") from error
    if end != room:
        raise UserError(f"{path}: {room} bytes of tensors where its header tells {end}; restore it or write it anew")
    return header


def of_model(directory: Path) -> tuple[str, dict[str, str]]:
    """Fingerprint of a policy: its tensors and every other file beside or below them (config, tokenizer, template).

    Returns the fingerprint and the parts that it is made of.
    """
    weights = set(directory.glob("*.safetensors"))
    parts = of_tensors(weights)
    known = weights | {directory / MANIFEST, directory / "model.safetensors.index.json"}
    for path in sorted(directory.rglob("*")):
        if path.is_file() and path not in known:
            parts[f"file:{path.relative_to(directory).as_posix()}"] = of_file(path)
    return of_json(parts), parts
