"""A policy on disk whose files are checked against its manifest."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rloo_pipeline import fingerprint
from rloo_pipeline.errors import UserError
from rloo_pipeline.manifest import RESTORE, checked_fingerprint, read_manifest

Stamp = tuple[int, int, int, int]


@dataclass(frozen=True)
class Policy:
    """A directory of weights and tokenizer, known by its fingerprint."""

    model: Path
    fingerprint: str
    trust_remote_code: bool
    stamps: Mapping[str, Stamp]  # of its files, just before their content was looked at

    def check_unchanged(self) -> None:
        """Raise UserError if the files are no longer those that the fingerprint is of.

        To be called when the weights are loaded, and after each pass, since weights on a CPU can stay mapped from the
        file. The content is read again only if a file was touched.
        """
        if _stamps(self.model) == self.stamps:
            return
        if not self.model.is_dir() or fingerprint.of_model(self.model)[0] != self.fingerprint:
            raise UserError(
                f"{self.model}: its files changed while they were in use, so what came of them is thrown away; "
                f"{RESTORE}, then run this stage again"
            )


def open_policy(model: Path) -> Policy:
    """Check the files of a policy; raises UserError if they are missing or not what the manifest says."""
    stamps = _stamps(model)
    manifest = read_manifest(model)
    return Policy(model, checked_fingerprint(model), manifest["facts"]["trust_remote_code"], stamps)


def _stamps(model: Path) -> dict[str, Stamp]:
    """Inode, size and times of change of each file: any writing or replacing shows in them."""
    found = {path.relative_to(model).as_posix(): path.stat() for path in model.rglob("*")}
    return {name: (item.st_ino, item.st_size, item.st_mtime_ns, item.st_ctime_ns) for name, item in found.items()}
