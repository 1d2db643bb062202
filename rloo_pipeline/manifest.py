"""Manifests: what an artifact holds. An artifact without one does not exist."""

import json
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
    if manifest.get("fingerprint") != fingerprint.of_json(_described(manifest)):
        raise UserError(f"{path}: changed after it was written: its fingerprint is not that of its content; {RESTORE}")
    return manifest


def _described(manifest: dict[str, Any]) -> Any:
    """What the fingerprint is taken of: the parts of a model, the shards and facts of a table."""
    return manifest["parts"] if "parts" in manifest else {key: manifest.get(key) for key in ("shards", "facts")}


def write_model_manifest(directory: Path, **facts: Any) -> str:
    """Write the manifest of a model or trainer state from its files; returns the fingerprint."""
    whole, parts = fingerprint.of_model(directory)
    write_json(
        directory / fingerprint.MANIFEST,
        {"schema_version": SCHEMA_VERSION, "facts": facts, "parts": parts, "fingerprint": whole},
    )
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
