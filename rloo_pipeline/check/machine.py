"""What this machine has: the engine that will generate, GPU and memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec

from rloo_pipeline import gpu
from rloo_pipeline.check.memory import Need
from rloo_pipeline.check.report import Report, size
from rloo_pipeline.config import Params
from rloo_pipeline.disk import GIB
from rloo_pipeline.engines.choose import choose_engine


@dataclass(frozen=True)
class Device:
    """Where the models run, and its memory, bytes."""

    name: str
    memory: int
    is_gpu: bool


def engine(params: Params, report: Report) -> str:
    """The engine that rollouts will take. vLLM is imported only where it is asked for by name: that takes seconds."""
    images = params.prompts.images_column is not None
    for stage, name in (("rollouts", params.rollouts.engine), ("evaluate", params.evaluate.engine)):
        if name == "auto" and not images and find_spec("vllm") is not None:
            report.ok(f"{stage}.engine", "auto: vllm is installed and generates, if it can be imported")
        elif name == "auto" and not images:
            report.ok(f"{stage}.engine", "auto: vllm is not installed; transformers generates")
        elif (chosen := report.attempt(f"{stage}.engine", choose_engine, name, images=images)) is not None:
            report.ok(f"{stage}.engine", chosen[1])
    vllm = params.rollouts.engine == "vllm" or (params.rollouts.engine == "auto" and find_spec("vllm") is not None)
    return "vllm" if vllm and not images else "transformers"


def device(report: Report) -> Device:
    """The GPU if torch sees one, else the CPU with the machine's memory."""
    import psutil
    import torch

    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        found = Device(torch.cuda.get_device_name(), total, is_gpu=True)
        text = f"{found.name}, {total / GIB:.0f} GiB, {free / GIB:.0f} GiB of them free"
        if free < 0.9 * total:
            report.warning("device", f"{text}: something else holds the rest")
        else:
            report.ok("device", text)
        return found
    memory = psutil.virtual_memory().total
    text = f"CPU, {memory / GIB:.0f} GiB of memory"
    if gpu.devices():
        report.warning("device", f"{text}: this machine has a GPU, but torch cannot use it; install torch for CUDA")
    else:
        report.ok("device", text)
    return Device("this machine", memory, is_gpu=False)


def memory(needs: Sequence[Need], machine: Device, report: Report) -> None:
    """Compare what each stage will take with what there is."""
    for need in needs:
        parts = ", ".join(f"{what} {size(part)}" for what, part in need.parts.items())
        text = f"about {size(need.total)} ({parts}) of {size(machine.memory)}"
        where = f"memory of {need.stage}"
        if need.sure > machine.memory:
            report.error(where, f"{text}: does not fit whatever the batch sizes; take a smaller model or more memory")
        elif need.total > 0.9 * machine.memory:
            report.warning(where, f"{text}: may not fit; lower the batch sizes under execution")
        else:
            report.ok(where, text)
