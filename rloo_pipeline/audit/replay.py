"""A stage executed again beside the project: its inputs linked, its outputs in a scratch directory."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

from rloo_pipeline.config import Params
from rloo_pipeline.errors import UserError
from rloo_pipeline.layout import Layout

# What most of a stage's start goes into: imported once, and each stage's process is a copy of that one.
IMPORTS = ["torch", "transformers.generation.utils", "transformers.models.auto.modeling_auto", "pyarrow.parquet"]
LIGHT = ("rewards", "advantages")


@dataclass(frozen=True)
class Scratch(Layout):
    """The project's layout with artifacts, records and work in progress in another directory.

    The user's own files are still those of the project.
    """

    directory: Path = Path()

    @property
    def artifacts(self) -> Path:
        return self.directory / "artifacts"

    def metrics(self, stage: str, iteration: str) -> Path:
        return self.directory / "metrics" / stage / f"{iteration}.json"

    def timings(self, stage: str, iteration: str) -> Path:
        return self.directory / "timings" / stage / f"{iteration}.json"

    def provenance(self, stage: str, iteration: str) -> Path:
        return self.directory / "provenance" / stage / f"{iteration}.json"

    @property
    def state(self) -> Path:
        return self.directory / ".rloo"


def link(layout: Layout, scratch: Scratch, paths: Iterable[Path]) -> None:
    """Put the project's artifacts at `paths` into the scratch: new directories, each file a symbolic link.

    A stage replaces files by rename or removes directories, which then reaches the links and not the originals.
    """
    for path in paths:
        target = scratch.artifacts / path.relative_to(layout.artifacts)
        folder = target.parent if path.is_file() else target
        folder.mkdir(parents=True, exist_ok=True)
        for item in [path] if path.is_file() else path.iterdir():
            (folder / item.name).symlink_to(item.resolve())


def prepare_processes(params: Params, stages: Iterable[str]) -> None:
    """Set threads, network and imports of the processes to come, before the first one."""
    if params.execution.threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(params.execution.threads)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    # Importing may start the GPU's driver, which does not survive the fork.
    if not Path("/dev/nvidiactl").exists() and not set(stages) <= set(LIGHT):
        multiprocessing.get_context("forkserver").set_forkserver_preload(IMPORTS)


def replay(stage: str, scratch: Scratch, params: Params, iteration: str) -> None:
    """Run a stage in a process of its own, which gives all memory back; raises UserError as the stage does."""
    context = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(1, context, _die_with_parent) as pool:
        try:
            pool.submit(_run, stage, scratch, params, iteration).result()
        except BrokenProcessPool as error:
            raise UserError(
                f"{stage} {iteration}: its process was killed, perhaps for want of memory; run it again when there is "
                "more, or lower the batch sizes under execution"
            ) from error


def _run(stage: str, scratch: Scratch, params: Params, iteration: str) -> None:
    from rloo_pipeline.stages import dispatch

    dispatch.run(stage, scratch, params, iteration)


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()

    def watch() -> None:
        if parent is not None:
            parent.join()
            os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True, name="die-with-parent").start()
