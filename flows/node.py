"""The machine that a flow runs on: its GPUs' slots, and the worker that must not be outlived."""

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil
from prefect import get_run_logger
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import GlobalConcurrencyLimitCreate
from prefect.concurrency.sync import concurrency
from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound

from rloo_pipeline import gpu

SECONDS_OF_A_LEASE = 60  # the least that a server accepts: how long the slot of a lost machine stays taken
SECONDS_TO_END_STAGES = 5.0
SECONDS_TO_END = 60.0


def limits() -> list[str]:
    """Names of the concurrency limits of this machine: one for each GPU that a stage would take, else one for all."""
    host = f"rloo-gpu-{socket.gethostname()}"
    return [f"{host}-{device.replace('/', '_')}" for device in gpu.devices()] or [host]


@contextmanager
def slot() -> Iterator[None]:
    """Wait for this machine's turn among all flow runs, and keep it; a dead holder's lease runs out.

    Limits that are not there are made with one slot.
    """
    with get_client(sync_client=True) as client:
        for limit in limits():
            try:
                client.read_global_concurrency_limit_by_name(limit)
            except ObjectNotFound:
                with suppress(ObjectAlreadyExists):
                    client.create_global_concurrency_limit(GlobalConcurrencyLimitCreate(name=limit, limit=1))
    # A server that is away for a while must not end a stage that runs.
    with concurrency(limits(), lease_duration=SECONDS_OF_A_LEASE, strict=True, raise_on_lease_renewal_failure=False):
        yield


def end_with_worker() -> None:
    """From now on, end this process when the worker that started it is gone; without a worker nothing happens."""
    if "PREFECT__FLOW_RUN_ID" not in os.environ:
        return
    worker, log = os.getppid(), get_run_logger()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a worker in the background is deaf to it

    def watch() -> None:
        while os.getppid() == worker:
            time.sleep(0.2)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in (1, 2):  # the worker's pipes: Prefect's log handler ends the process at a broken one
            os.dup2(nowhere, stream)
        log.error("the worker that started this run is gone, so the run ends")
        # Unlike SIGTERM this lets Prefect tell the server of the crash and give the slot back before the process ends.
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(SECONDS_TO_END_STAGES)
        for child in psutil.Process().children(recursive=True):
            child.kill()
        time.sleep(SECONDS_TO_END)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True, name="end-with-worker").start()


def wait_for_server(seconds: float) -> None:
    """Wait until the server of PREFECT_API_URL answers; raises what it last said if it does not in time."""
    deadline = time.monotonic() + seconds
    with get_client(sync_client=True) as client:
        while (error := client.api_healthcheck()) is not None:
            if time.monotonic() > deadline:
                raise error
            time.sleep(0.5)
