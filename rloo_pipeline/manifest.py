"""Manifests: what an artifact holds. An artifact without one does not exist."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rloo_pipeline import fingerprint
from rloo_pipeline.errors import UserError
from rloo_pipeline.files import write_json
from rloo_pipeline.schema import SCHEMA_VERSION

RESTORE = "restore it with `dvc checkout` or run the stage that makes it again"


def read_manifest(directory: Path) -> dict[str, Any]:
    """The manifest of an artifact; raises UserError if it is missing, broken, edited or of another schema version."""
    path = directory / fingerprint.MANIFEST
    try:
        manifest: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such file, so {directory} is not complete; run the stage that makes it") from error
    except ValueError as error:
        raise UserError(f"{path}: not readable as JSON ({error}); {RESTORE}") from error
    if not isinstance(manifest, dict):
        raise UserError(f"{path}: not a JSON object; {RESTORE}")
    if manifest.get("schema_version") != SCHEMA_VERSION:
        raise UserError(
            f"{path}: schema version {manifest.get('schema_version')}, this package reads {SCHEMA_VERSION}; "
            "run the stage again or install the version that wrote it"
        )
    if manifest.get("seal") != _seal(manifest) or manifest.get("fingerprint") != _whole(manifest):
        raise UserError(
            f"{path}: changed after it was written, or written by an earlier version: its seal is not that of its "
            f"content; {RESTORE}"
        )
    return manifest


def write_manifest(directory: Path, **content: Any) -> None:
    """Write a manifest of this content with the schema version and a seal: a hash of all that stands in it."""
    manifest = {"schema_version": SCHEMA_VERSION, **content}
    write_json(directory / fingerprint.MANIFEST, {**manifest, "seal": _seal(manifest)})


def _seal(manifest: Mapping[str, Any]) -> str:
    # The fingerprint is of the content that later stages depend on alone; the seal covers what is beside it too.
    return fingerprint.of_json({key: value for key, value in manifest.items() if key != "seal"})


def _whole(manifest: Mapping[str, Any]) -> str:
    """The fingerprint: of the parts of a model, or of the shards and facts of a table."""
    return fingerprint.of_json(manifest.get("parts", {key: manifest.get(key) for key in ("shards", "facts")}))


def write_model_manifest(directory: Path, **facts: Any) -> str:
    """Write the manifest of a model or trainer state from its files; returns the fingerprint."""
    whole, parts = fingerprint.of_model(directory)
    write_manifest(directory, facts=facts, parts=parts, fingerprint=whole)
    return whole


def checked_fingerprint(directory: Path) -> str:
    """The fingerprint of a model's files as they are now; raises UserError if the manifest says another."""
    manifest = read_manifest(directory)
    whole, parts = fingerprint.of_model(directory)
    if whole != manifest["fingerprint"]:
        keys = sorted(parts.keys() | manifest["parts"].keys())
        changed = [key for key in keys if parts.get(key) != manifest["parts"].get(key)]
        raise UserError(f"{directory}: {', '.join(changed[:3])} changed after the manifest was written; {RESTORE}")
    return whole
