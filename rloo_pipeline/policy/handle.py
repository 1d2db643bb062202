"""A policy on disk whose files are checked against its manifest."""

from dataclasses import dataclass
from pathlib import Path

from rloo_pipeline.manifest import checked_fingerprint, read_manifest


@dataclass(frozen=True)
class Policy:
    """A directory of weights and tokenizer, known by its fingerprint."""

    model: Path
    fingerprint: str
    trust_remote_code: bool


def open_policy(model: Path) -> Policy:
    """Check the files of a policy; raises UserError if they are missing or not what the manifest says."""
    manifest = read_manifest(model)
    return Policy(model, checked_fingerprint(model), manifest["facts"]["trust_remote_code"])
