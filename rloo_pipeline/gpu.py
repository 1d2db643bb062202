"""One GPU stage at a time on a machine, whoever started it."""

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from rloo_pipeline.layout import Layout
from rloo_pipeline.process import SECONDS_TO_DIE, hold

STAGES = ("reward_model", "rollouts", "logprobs", "rewards", "update", "evaluate")


def devices() -> list[str]:
    """The GPUs that a stage would take: those of CUDA_VISIBLE_DEVICES if it is set, else all of the machine."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return sorted(path.name.removeprefix("nvidia") for path in Path("/dev").glob("nvidia[0-9]*"))
    return sorted({name.strip() for name in visible.split(",")} - {"", "-1"})


@contextmanager
def exclusive(layout: Layout, what: str) -> Iterator[None]:
    """Hold the locks of all GPUs that a stage would take; raises Busy that names the stage which has one of them.

    The locks lie in the user's cache folder, which every shell, service and project of this user sees; the host is in
    their names, since a home can be shared between machines.
    """
    folder = Path.home() / ".cache" / "rloo-pipeline"
    holder = {"stage": what, "project": str(layout.root.resolve())}
    with ExitStack() as stack:
        for device in devices():
            path = folder / f"gpu-{socket.gethostname()}-{device.replace('/', '_')}.lock"
            stack.enter_context(hold(path, holder, f"on GPU {device} of this machine", SECONDS_TO_DIE))
        yield
