"""A real Prefect server and worker of a test's own, spoken to over the API as the UI does."""

import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.project import Project, environment

SECONDS = 600.0


def wait_for(what: str, look: Callable[[], Any], seconds: float = SECONDS, pause: float = 0.2) -> Any:
    """The first true value of `look`; fails with `what` if there is none in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := look():
            return found
        time.sleep(pause)
    raise AssertionError(f"{what}: not within {seconds} s")


def stage_processes(project: Project, stage: str) -> list[psutil.Process]:
    """The processes of `rloo <stage>` in a project's folder and the DVC that started it; none if it is not up."""
    found = {}
    for process in psutil.process_iter():
        try:
            command = " ".join(process.cmdline())
            if process.cwd() == str(project.root) and ("dvc repro" in command or "rloo " in command):
                found[process] = command
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return list(found) if any(f"rloo {stage}" in command for command in found.values()) else []


def hold_still(project: Project, stage: str) -> list[psutil.Process]:
    """Wait for a stage's process and stop it in the middle; returns it and the DVC that started it."""
    processes = wait_for(f"{stage} runs", lambda: stage_processes(project, stage))
    next(process for process in processes if f"rloo {stage}" in " ".join(process.cmdline())).suspend()
    return list(processes)


class Scheduler:
    """A server, one work pool `gpu`, and a worker that can be killed and started again."""

    def __init__(self, folder: Path, **extra: str) -> None:
        folder.mkdir()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.folder, self.ui = folder, f"http://127.0.0.1:{port}"
        self.env = environment(
            PREFECT_HOME=str(folder / "home"),
            PREFECT_API_URL=f"{self.ui}/api",
            PREFECT_SERVER_ANALYTICS_ENABLED="false",
            PREFECT_WORKER_QUERY_SECONDS="1",
            PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE="prefect.server.concurrency.lease_storage.filesystem",
            DO_NOT_TRACK="1",
            HOME=str(folder),
            **extra,
        )
        self.api = httpx.Client(base_url=f"{self.ui}/api", timeout=60)
        self.running: list[subprocess.Popen[bytes]] = []
        self._start("server", "server", "start", "--host", "127.0.0.1", "--port", str(port))
        self.answered_at_once = self._healthy()
        waits = [sys.executable, "-c", f"from flows import node; node.wait_for_server({SECONDS})"]
        subprocess.run(waits, env=self.env, check=True)
        self.prefect("work-pool", "create", "gpu", "--type", "process")
        self.start_worker()

    def _healthy(self) -> bool:
        try:
            return self.api.get("/health").status_code == 200
        except httpx.TransportError:
            return False

    def _start(self, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.log").open("ab") as log:
            command = ["prefect", *arguments]
            process = subprocess.Popen(command, env=self.env, cwd=self.folder, stdout=log, stderr=subprocess.STDOUT)
        self.running.append(process)
        return process

    def start_worker(self) -> None:
        """Start the worker, as a user does in a shell that has nothing but the server's address."""
        self.worker = self._start("worker", "worker", "start", "--pool", "gpu", "--name", f"worker-{len(self.running)}")

    def prefect(self, *arguments: str, cwd: Path | None = None) -> str:
        """Run Prefect's command line to its end."""
        done = subprocess.run(
            ["prefect", "--no-prompt", *arguments], env=self.env, cwd=cwd or self.folder, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def stop(self) -> None:
        """End what was started here, and nothing else."""
        for process in reversed(self.running):
            process.terminate()
        for process in reversed(self.running):
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.api.close()

    def post(self, path: str, **body: Any) -> Any:
        """What the API answers to a POST."""
        return self._answer("POST", path, json=body)

    def get(self, path: str) -> Any:
        """What the API answers to a GET."""
        return self._answer("GET", path)

    def _answer(self, method: str, path: str, **body: Any) -> Any:
        """As Prefect's own client does, ask again while the server's database is locked (503)."""
        for _ in range(20):
            answer = self.api.request(method, path, **body)
            if answer.status_code != httpx.codes.SERVICE_UNAVAILABLE:
                break
            time.sleep(1)
        answer.raise_for_status()
        return answer.json()

    def run(self, deployment: str, **parameters: Any) -> str:
        """Start a flow run of a deployment, as the UI's button does; returns its id."""
        found = self.get(f"/deployments/name/rloo-training/{deployment}")
        return str(
            self.post(
                f"/deployments/{found['id']}/create_flow_run", parameters=parameters, state={"type": "SCHEDULED"}
            )["id"]
        )

    def cancel(self, run: str) -> None:
        """What the UI's Cancel button sends."""
        self.post(f"/flow_runs/{run}/set_state", state={"type": "CANCELLING"})

    def state(self, run: str) -> str:
        """The name of a flow run's state."""
        return str(self.get(f"/flow_runs/{run}")["state_name"])

    def ends(self, run: str, seconds: float = SECONDS) -> str:
        """The name of the state that a flow run ends in."""
        final = ("Completed", "Failed", "Cancelled", "Crashed")
        return str(wait_for("the run ends", lambda: (s := self.state(run)) in final and s, seconds))

    def family(self, run: str) -> list[str]:
        """The ids of a flow run and its subflow runs."""
        children = self.post("/flow_runs/filter", flow_runs={"parent_flow_run_id": {"any_": [run]}}, limit=200)
        return [run, *(child["id"] for child in children)]

    def tasks(self, run: str) -> list[dict[str, Any]]:
        """The task runs of a flow run and its subflows, in order of their start."""
        found = self.post("/task_runs/filter", flow_runs={"id": {"any_": self.family(run)}}, limit=200)
        return sorted(found, key=lambda task: task["start_time"] or "")

    def logs(self, run: str, task: str | None = None) -> list[str]:
        """The log lines of a flow run's family, or of one task of it, in order."""
        chosen = {"flow_run_id": {"any_": self.family(run)}}
        if task is not None:
            chosen = {"task_run_id": {"any_": [one["id"] for one in self.tasks(run) if one["name"] == task]}}
        found = self.post("/logs/filter", logs=chosen, limit=200, sort="TIMESTAMP_ASC")
        return [line["message"] for line in found]

    def artifacts(self, run: str) -> dict[str, dict[str, Any]]:
        """The artifacts of a flow run's family by key."""
        found = self.post("/artifacts/filter", artifacts={"flow_run_id": {"any_": self.family(run)}}, limit=200)
        return {artifact["key"]: artifact for artifact in found}

    def retry(self, run: str) -> None:
        """What the UI's Retry button sends."""
        self.post(f"/flow_runs/{run}/set_state", state={"type": "SCHEDULED", "name": "AwaitingRetry"})

    def slots(self, limit: str) -> int:
        """How many slots of a concurrency limit are taken."""
        return int(self.get(f"/v2/concurrency_limits/{limit}")["active_slots"])
