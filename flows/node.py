"""The machine that a flow runs on: its GPUs' slots, and the worker that must not be outlived."""

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING
from uuid import UUID

import httpx
import psutil
from prefect import get_run_logger
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import GlobalConcurrencyLimitCreate
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterId,
    FlowRunFilterParentFlowRunId,
    FlowRunFilterState,
    FlowRunFilterStateType,
    TaskRunFilter,
    TaskRunFilterState,
    TaskRunFilterStateType,
)
from prefect.client.schemas.objects import State, StateType
from prefect.concurrency.asyncio import ConcurrencySlotAcquisitionError
from prefect.concurrency.sync import concurrency
from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound
from prefect.settings import PREFECT_API_URL
from prefect.states import Crashed

from rloo_pipeline import gpu
from rloo_pipeline.errors import UserError

if TYPE_CHECKING:
    from prefect.logging.loggers import LoggingAdapter

SECONDS_OF_A_LEASE = 60  # the least that a server accepts: how long the slot of a lost machine stays taken
SECONDS_BETWEEN_TRIES = 2.0
LOCKED = 423  # the HTTP status that tells of a taken slot
SECONDS_BETWEEN_LOOKS = 1.5
LOOKS = 3  # that a cancelled run still lives; the worker's signal comes sooner, if it comes
SECONDS_TO_END_STAGES = 5.0
SECONDS_TO_END = 60.0
RUNNING = FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.RUNNING]))
RUNNING_TASKS = TaskRunFilterState(type=TaskRunFilterStateType(any_=[StateType.RUNNING]), name=None)


def limits() -> list[str]:
    """Names of the concurrency limits of this machine: one for each GPU that a stage would take, else one for all."""
    host = f"rloo-gpu-{socket.gethostname()}"
    return [f"{host}-{device.replace('/', '_')}" for device in gpu.devices()] or [host]


@contextmanager
def slot() -> Iterator[None]:
    """Wait for this machine's turn among all flow runs, and keep it; a dead holder's lease runs out.

    Limits that are not there are made with one slot.
    """
    with ExitStack() as held:
        while not (_has_room() and _take(held)):
            time.sleep(SECONDS_BETWEEN_TRIES)  # not Prefect's own wait: no signal gets through during that
        try:
            yield
        finally:
            with suppress(httpx.HTTPError):  # a server that is away must not undo what a stage did; the lease runs out
                held.close()


def _take(held: ExitStack) -> bool:
    taking = concurrency(
        limits(),
        max_retries=0,
        lease_duration=SECONDS_OF_A_LEASE,
        strict=True,
        raise_on_lease_renewal_failure=False,  # a server that is away for a while must not end a stage that runs
    )
    try:
        held.enter_context(taking)
    except ConcurrencySlotAcquisitionError as error:
        if isinstance(error.__cause__, httpx.HTTPStatusError) and error.__cause__.response.status_code == LOCKED:
            return False
        raise
    return True


def _has_room() -> bool:
    """Whether a try is worth it: Prefect logs each one that finds the slot taken as an error."""
    with get_client(sync_client=True) as client:
        found = []
        for limit in limits():
            try:
                found.append(client.read_global_concurrency_limit_by_name(limit))
            except ObjectNotFound:
                with suppress(ObjectAlreadyExists):
                    client.create_global_concurrency_limit(GlobalConcurrencyLimitCreate(name=limit, limit=1))
    return all(limit.active_slots < limit.limit or not limit.active for limit in found)


def end_with_worker() -> threading.Event:
    """From now on, end this process when the worker that started it is gone, or does not act on a cancel.

    Returns what is set when a cancel is acted on here, just before the signal. Without a worker nothing happens.
    """
    cancelled = threading.Event()
    if run := os.environ.get("PREFECT__FLOW_RUN_ID"):
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a worker in the background is deaf to it
        for name, watch, arguments in (
            ("end-with-worker", _end_without, (os.getppid(), get_run_logger())),
            ("end-when-cancelled", _end_when_cancelled, (UUID(run), cancelled)),
        ):
            threading.Thread(target=watch, args=arguments, daemon=True, name=name).start()
    return cancelled


def _end_without(worker: int, log: "LoggingAdapter") -> None:
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


def _end_when_cancelled(run: UUID, cancelled: threading.Event) -> None:
    """A worker acts on the first cancel of a run alone: not on one after a retry, as long as the worker lives."""
    looks = 0
    with get_client(sync_client=True) as client:
        while looks < LOOKS:
            time.sleep(SECONDS_BETWEEN_LOOKS)
            with suppress(httpx.HTTPError):
                state = client.read_flow_run(run).state
                looks = looks + 1 if state is not None and state.is_cancelling() else 0
    cancelled.set()
    os.kill(os.getpid(), signal.SIGTERM)


def end_lost(run: UUID) -> None:
    """Set what still counts as running of this run's earlier tries to Crashed: a killed process could not tell."""
    family = FlowRunFilterParentFlowRunId(any_=[run])
    crashed: State[None] = Crashed(message="its process was killed")
    with get_client(sync_client=True) as client:
        subflows = client.read_flow_runs(flow_run_filter=FlowRunFilter(parent_flow_run_id=family, state=RUNNING))
        ids = [run, *(subflow.id for subflow in subflows)]
        flows = FlowRunFilter(id=FlowRunFilterId(any_=ids))
        for task in client.read_task_runs(flow_run_filter=flows, task_run_filter=TaskRunFilter(state=RUNNING_TASKS)):
            client.set_task_run_state(task.id, crashed, force=True)
        for subflow in subflows:
            client.set_flow_run_state(subflow.id, crashed, force=True)


def wait_for_server(seconds: float) -> None:
    """Wait until the server of PREFECT_API_URL answers; raises UserError if it does not in time."""
    deadline = time.monotonic() + seconds
    with get_client(sync_client=True) as client:
        while (error := client.api_healthcheck()) is not None:
            if time.monotonic() > deadline:
                raise UserError(
                    f"no Prefect server answers at {PREFECT_API_URL.value()} ({error}); start it, or unset "
                    "PREFECT_API_URL (`prefect config unset PREFECT_API_URL`) to run without a server"
                ) from error
            time.sleep(0.5)
