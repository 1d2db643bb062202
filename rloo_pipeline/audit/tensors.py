"""What differs between two directories of safetensors and files: a model or a trainer state."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rloo_pipeline.manifest import checked_fingerprint, read_manifest

if TYPE_CHECKING:
    import torch

FILE = "file:"


@dataclass(frozen=True)
class PartDifference:
    """A tensor or a file (file:<name>) that differs.

    side: both, or the only one that has it. values: how many numbers of a tensor differ, of how many `size`; largest:
    their largest absolute difference (None: NaN). All None where shapes or types differ, or for a file.
    """

    name: str
    side: str
    values: int | None = None
    size: int | None = None
    largest: float | None = None


def compare_parts(left: Path, right: Path) -> list[PartDifference]:
    """Tensors and files that differ, the largest difference first; UserError if a manifest is not of its files.

    Only tensors whose fingerprints differ are read, one at a time.
    """
    if checked_fingerprint(left) == checked_fingerprint(right):
        return []
    ours, theirs = (read_manifest(directory)["parts"] for directory in (left, right))
    found = []
    for name in sorted(ours.keys() | theirs.keys()):
        if name not in theirs or name not in ours:
            found.append(PartDifference(name, "left" if name in ours else "right"))
        elif ours[name] != theirs[name]:
            # A part is told as dtype, shape and hash.
            alike = not name.startswith(FILE) and ours[name].rpartition(" ")[0] == theirs[name].rpartition(" ")[0]
            found.append(_of_tensors(name, left, right) if alike else PartDifference(name, "both"))
    return sorted(found, key=lambda part: (-(part.largest or 0.0), part.name))


def _of_tensors(name: str, left: Path, right: Path) -> PartDifference:
    import torch

    ours, theirs = _load(left, name), _load(right, name)
    differs = (ours != theirs) & ~(torch.isnan(ours) & torch.isnan(theirs))
    gaps = (ours - theirs).abs()[differs]
    gaps = gaps[~gaps.isnan()]
    largest = float(gaps.max()) if gaps.numel() else None
    return PartDifference(name, "both", int(differs.sum()), differs.numel(), largest)


def _load(directory: Path, name: str) -> "torch.Tensor":
    import torch
    from safetensors import safe_open

    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            if name in file.keys():  # noqa: SIM118 (not a mapping)
                tensor: torch.Tensor = file.get_tensor(name)
                return tensor.to(torch.float64)
    raise KeyError(name)
