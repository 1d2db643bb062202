"""Whether a run fits on the disk."""

import shutil
from pathlib import Path

from rloo_pipeline.errors import UserError
from rloo_pipeline.layout import Layout
from rloo_pipeline.progress import say

BYTES_PER_PARAMETER = 12  # float32 weights and AdamW's two float32 moments
GIB = 2**30


def parameters(model: Path) -> int:
    """Number of parameters stored in the safetensors files of a model."""
    from safetensors import safe_open

    count = 0
    for path in model.glob("*.safetensors"):
        with safe_open(path, framework="np") as file:
            for name in file.keys():  # noqa: SIM118 (not a mapping)
                size = 1
                for length in file.get_slice(name).get_shape():
                    size *= length
                count += size
    return count


def check_space(layout: Layout, model: Path, iterations: int) -> None:
    """Raise UserError if the checkpoints of `iterations` more iterations will not fit.

    Files are linked between work tree and DVC cache, so each checkpoint counts once.
    """
    needed = iterations * parameters(model) * BYTES_PER_PARAMETER
    free = shutil.disk_usage(layout.root).free
    if needed > free:
        raise UserError(
            f"{iterations} iterations will write {needed / GIB:.1f} GiB of checkpoints (weights and optimizer, "
            f"{needed / max(iterations, 1) / GIB:.2f} GiB each), but {layout.root.resolve()} has {free / GIB:.1f} GiB "
            "free; make room or shorten the chain with `rloo iterations N`"
        )
    say(f"disk: {iterations} iterations will write about {needed / GIB:.1f} GiB, {free / GIB:.1f} GiB are free")
