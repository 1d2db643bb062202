"""What a stage takes of the machine: CPU, memory and GPUs, looked at while it runs."""

import importlib
import json
import statistics
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rloo_pipeline.files import write_json

SECONDS_BETWEEN_LOOKS = 1.0
MEGABYTE = 10**6


@contextmanager
def watched(timings: Path) -> Iterator[None]:
    """Watch the machine during a stage that ends well, and add means and maxima to its timings under `system`."""
    looks: dict[str, list[float]] = defaultdict(list)
    ended = threading.Event()
    thread = threading.Thread(target=_watch, args=(looks, ended), daemon=True, name="system-metrics")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    values = json.loads(timings.read_text(encoding="utf-8"))
    write_json(timings, {**values, "system": _summary(looks)})


def _watch(looks: dict[str, list[float]], ended: threading.Event) -> None:
    import psutil

    process, read_gpus = psutil.Process(), _gpu_reader()
    psutil.cpu_percent()  # the first call has nothing to compare with
    while True:
        last = ended.wait(SECONDS_BETWEEN_LOOKS)
        looks["cpu_utilization_percentage"].append(psutil.cpu_percent())
        looks["system_memory_usage_megabytes"].append(psutil.virtual_memory().used / MEGABYTE)
        looks["process_memory_megabytes"].append(_memory(process) / MEGABYTE)
        for key, value in read_gpus():
            looks[key].append(value)
        if last:
            return


def _memory(process: Any) -> int:
    """Bytes that the stage and its children hold."""
    import psutil

    total = 0
    for item in [process, *process.children(recursive=True)]:
        with suppress(psutil.Error):  # a child may just have ended
            total += item.memory_info().rss
    return total


def _gpu_reader() -> Callable[[], Iterator[tuple[str, float]]]:
    """What tells the memory and the load of each NVIDIA GPU; nothing without nvidia-ml-py or a driver."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return lambda: iter(())
    try:
        nvml.nvmlInit()
        gpus = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    except nvml.NVMLError:
        return lambda: iter(())

    def read() -> Iterator[tuple[str, float]]:
        for index, gpu in enumerate(gpus):
            with suppress(nvml.NVMLError):  # a virtual GPU may not tell its load
                yield f"gpu_{index}_memory_usage_megabytes", nvml.nvmlDeviceGetMemoryInfo(gpu).used / MEGABYTE
                yield f"gpu_{index}_utilization_percentage", float(nvml.nvmlDeviceGetUtilizationRates(gpu).gpu)

    return read


def _summary(looks: dict[str, list[float]]) -> dict[str, float]:
    means = {f"{key}_mean": statistics.fmean(values) for key, values in looks.items()}
    return means | {f"{key}_max": max(values) for key, values in looks.items()}
