"""A training run as its user schedules it: real server, worker and deployment, cancelled, killed, resumed, finished."""

import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq
import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

from flows import artifacts, chain, node, training
from rloo_pipeline.layout import Layout
from rloo_pipeline.tracking.book import Run, write_runs
from tests.browser import page_text
from tests.conftest import varied_project
from tests.project import REPOSITORY, Project
from tests.scheduler import Scheduler, hold_still, wait_for

pytestmark = pytest.mark.timeout(1800)
LIMIT = node.limits()[0]
LOST = f"rloo-gpu-{socket.gethostname()}-9"
SLOT_HOLDER = """
import time
from flows import artifacts, chain, node, training
with node.slot():
    print("held", flush=True)
    time.sleep(3600)
"""


@dataclass
class Story:
    """What happened, told once for all tests."""

    scheduler: Scheduler
    project: Project
    by_hand: Project
    runs: dict[str, str] = field(default_factory=dict)  # ids
    ends: dict[str, str] = field(default_factory=dict)  # names of the last states
    survivors: dict[str, list[psutil.Process]] = field(default_factory=dict)  # 10 s after
    seen: dict[str, Any] = field(default_factory=dict)


def extended_by_hand(finished: Project, root: Path) -> Project:
    """A copy of a finished project of two iterations, after a third by `dvc repro`."""
    project = finished.copy(root)
    project.rloo("iterations", "3")
    project.repro()
    return project


def cancelled(story: Story) -> None:
    """Cancel in the middle of the first rollouts."""
    scheduler, run = story.scheduler, story.scheduler.run("train", iterations=3)
    processes = hold_still(story.project, "rollouts 0001")
    wait_for("the log has the stage's line", lambda: "> rloo rollouts 0001" in scheduler.logs(run, "rollouts@0001"))
    story.seen["state while logged"] = [t["state_name"] for t in scheduler.tasks(run) if t["name"] == "rollouts@0001"]
    story.seen["slots while held"] = scheduler.slots(LIMIT)
    scheduler.cancel(run)
    story.survivors["cancel"] = psutil.wait_procs(processes, timeout=10)[1]
    story.runs["cancelled"], story.ends["cancelled"] = run, scheduler.ends(run)


def cancelled_again(story: Story) -> None:
    """Press Retry on the cancelled run, and Cancel again: a worker acts on the first cancel of a run alone."""
    scheduler, run = story.scheduler, story.runs["cancelled"]
    scheduler.retry(run)
    processes = hold_still(story.project, "rollouts 0001")
    scheduler.cancel(run)
    story.survivors["second cancel"] = psutil.wait_procs(processes, timeout=10)[1]
    story.ends["cancelled again"] = scheduler.ends(run)


def cancelled_while_waiting(story: Story) -> None:
    """Cancel a run that waits for the slot."""
    scheduler = story.scheduler
    scheduler.post("/v2/concurrency_limits/increment", names=[LIMIT], slots=1, mode="concurrency")
    run = scheduler.run("train")
    wait_for("it waits", lambda: f"waits for its turn: {LIMIT}" in scheduler.logs(run))
    scheduler.cancel(run)
    story.runs["waiting"], story.ends["waiting"] = run, scheduler.ends(run)
    scheduler.post("/v2/concurrency_limits/decrement", names=[LIMIT], slots=1)


def worker_killed(story: Story) -> None:
    """Resume, with a target; kill -9 the worker in the middle of the second update."""
    run = story.scheduler.run("train", target="store")
    processes = hold_still(story.project, "update 0002")
    story.scheduler.worker.kill()
    story.survivors["worker"] = psutil.wait_procs(processes, timeout=10)[1]
    story.runs["resumed"], story.ends["worker killed"] = run, story.scheduler.ends(run)
    wait_for("the slot is free", lambda: story.scheduler.slots(LIMIT) == 0, seconds=120)
    story.scheduler.start_worker()


def flow_killed(story: Story) -> None:
    """Press Retry on the crashed run; kill -9 the flow's process in the middle of a stage without a slot."""
    run = story.runs["resumed"]
    story.scheduler.retry(run)
    processes = hold_still(story.project, "advantages 0003")
    flow = next(one for one in processes[0].parents() if "prefect" in " ".join(one.cmdline()))
    flow.kill()
    story.survivors["flow"] = psutil.wait_procs(processes, timeout=10)[1]
    wait_for("the run is crashed", lambda: story.scheduler.state(run) == "Crashed")


def retried(story: Story) -> None:
    """Press Retry on the crashed run; kill -9 DVC in the middle of the last evaluation; let the run end."""
    run = story.runs["resumed"]
    story.scheduler.retry(run)
    processes = hold_still(story.project, "evaluate 0003")
    next(process for process in processes if process.cmdline()[1:4] == ["-m", "dvc", "repro"]).kill()
    story.survivors["dvc"] = psutil.wait_procs(processes, timeout=10)[1]
    wait_for("another try", lambda: story.scheduler.state(run) != "AwaitingRetry")
    story.ends["retried"] = story.scheduler.ends(run)


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory, finished_project: Project) -> Iterator[Story]:
    """Everything that is told of in the tests below."""
    folder = tmp_path_factory.mktemp("scheduled")
    project = varied_project(folder / "node")
    # The flow itself is not here: it comes from the installed package.
    shutil.copyfile(REPOSITORY / "prefect.yaml", project.root / "prefect.yaml")
    # As a run that was tracked on a server is noted; nothing asks that server here.
    write_runs(Layout(project.root), [Run("http://mlflow.example", "7", "abc")])
    project.run("dvc", "remote", "add", "store", str(folder / "store"))
    scheduler = Scheduler(folder / "scheduler", MLFLOW_TRACKING_URI="http://mlflow.example")
    try:
        scheduler.prefect("deploy", "--all", cwd=project.root)
        lost = {**scheduler.env, "CUDA_VISIBLE_DEVICES": "9"}
        with (
            ThreadPoolExecutor(1) as pool,
            subprocess.Popen([sys.executable, "-c", SLOT_HOLDER], env=lost, stdout=subprocess.PIPE) as holder,
        ):
            by_hand = pool.submit(extended_by_hand, finished_project, folder / "by hand")
            assert holder.stdout is not None
            assert holder.stdout.readline() == b"held\n"
            holder.kill()
            told = Story(scheduler, project, project)
            told.seen["slots of the lost"] = scheduler.slots(LOST)
            cancelled(told)
            cancelled_again(told)
            cancelled_while_waiting(told)
            worker_killed(told)
            flow_killed(told)
            retried(told)
            told.by_hand = by_hand.result()
        yield told
    finally:
        scheduler.stop()


def test_run_equals_dvc_by_hand(story: Story) -> None:
    assert story.ends["retried"] == "Completed"
    assert story.project.lock() == story.by_hand.lock()
    assert story.project.run("dvc", "status", "--json").stdout.strip() == "{}"


def test_a_starting_server_is_waited_for(story: Story) -> None:
    """The part of PREFECT-SQLITE that needs a server; everything above came after the wait."""
    assert not story.scheduler.answered_at_once
    assert story.scheduler.get("/health")


def test_cancel_leaves_no_process(story: Story) -> None:
    assert story.survivors["cancel"] == []
    assert story.ends["cancelled"] == "Cancelled"


def test_a_cancel_after_a_retry_leaves_no_process(story: Story) -> None:
    assert story.survivors["second cancel"] == []
    assert story.ends["cancelled again"] == "Cancelled"


def test_a_run_that_waits_is_cancelled(story: Story) -> None:
    """The process ends by itself: after a kill -9 its task would still count as running."""
    assert story.ends["waiting"] == "Cancelled"
    assert "Running" not in {task["state_name"] for task in story.scheduler.tasks(story.runs["waiting"])}
    assert "failed to process item" not in (story.scheduler.folder / "worker.log").read_text()


def test_killed_flow_leaves_no_process_and_no_running_subflow(story: Story) -> None:
    assert story.survivors["flow"] == []
    states = {story.scheduler.state(run) for run in story.scheduler.family(story.runs["resumed"])}
    assert states == {"Completed", "Crashed"}


def test_the_target_gets_the_artifacts(story: Story) -> None:
    assert story.project.run("dvc", "status", "--remote", "store", "--json").stdout.strip() == "{}"


@pytest.fixture
def spoken_to(story: Story, monkeypatch: pytest.MonkeyPatch) -> Iterator[Story]:
    """The story's server is the one that flows of this process speak to."""
    monkeypatch.setenv(training.RUN_ID, "")
    with temporary_settings({PREFECT_API_URL: f"{story.scheduler.ui}/api"}):
        yield story


def test_a_user_error_is_not_tried_again(spoken_to: Story) -> None:
    state: Any = training.training(project=str(spoken_to.project.root), target="nowhere", return_state=True)
    assert state.is_failed()
    (task,) = spoken_to.scheduler.tasks(str(state.state_details.flow_run_id))
    assert (task["name"], task["state_name"], task["run_count"]) == ("params", "Failed", 1)
    assert "target nowhere: no such DVC remote; there are: store" in task["state"]["message"]


def test_an_iteration_that_cannot_be_shown_is_no_failed_run(
    spoken_to: Story, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chain, "of_iteration", lambda iteration: [])
    state: Any = training.one_iteration(str(tmp_path), "0001", False, return_state=True)
    assert state.is_completed()
    run = str(state.state_details.flow_run_id)
    wait_for("the warning", lambda: "is done, but not shown" in "".join(spoken_to.scheduler.logs(run)), 60)


def test_killed_worker_leaves_no_process(story: Story) -> None:
    assert story.survivors["worker"] == []
    assert story.ends["worker killed"] == "Crashed"
    told = "the worker that started this run is gone, so the run ends"
    assert told in story.scheduler.logs(story.runs["resumed"])


def test_killed_dvc_leaves_no_process_and_is_tried_again(story: Story) -> None:
    assert story.survivors["dvc"] == []
    last = [task for task in story.scheduler.tasks(story.runs["resumed"]) if task["name"] == "evaluate@0003"]
    assert [(task["state_name"], task["run_count"]) for task in last] == [("Completed", 2)]


def test_prefect_slots(story: Story) -> None:
    assert story.seen["slots while held"] == 1
    assert story.seen["slots of the lost"] == 1
    wait_for("the lease of the lost runs out", lambda: story.scheduler.slots(LOST) == 0, seconds=180)
    assert story.scheduler.slots(LIMIT) == 0


def test_prefect_cache(story: Story) -> None:
    """A retry runs what DVC finds changed, though Prefect has seen a subflow and tasks of the same names complete."""
    tasks = story.scheduler.tasks(story.runs["resumed"])
    states = {(task["name"], task["state_name"]) for task in tasks}
    for iteration in ("0001", "0002", "0003"):
        assert {(f"{stage}@{iteration}", "Completed") for stage in ("rollouts", "update", "evaluate")} <= states
    assert {(f"{stage}@0002", "Unchanged") for stage in ("rollouts", "logprobs", "rewards", "advantages")} <= states
    assert {state for _, state in states} == {"Completed", "Unchanged", "Crashed"}


def test_log_while_the_stage_runs(story: Story) -> None:
    assert story.seen["state while logged"] == ["Running"]
    lines = "\n".join(story.scheduler.logs(story.runs["resumed"], "rollouts@0003"))
    assert "generating, shard 2 of 2: 8/8 completions" in lines
    assert "rollouts 0003: done in" in lines


def test_evaluation_follows_its_iteration(story: Story) -> None:
    ran = [t["name"] for t in story.scheduler.tasks(story.runs["resumed"]) if t["state_name"] == "Completed"]
    assert ran.index("update@0001") < ran.index("evaluate@0001") < ran.index("rollouts@0002")
    assert ran.index("evaluate@0002") < ran.index("rollouts@0003")


def test_subflows_are_named_as_iterations(story: Story) -> None:
    names = {story.scheduler.get(f"/flow_runs/{run}")["name"] for run in story.scheduler.family(story.runs["resumed"])}
    assert {"iteration 0001", "iteration 0002", "iteration 0003"} <= names


def mean_reward(project: Project, iteration: str) -> float:
    """The mean reward over the stored completions."""
    shards = sorted((project.root / "artifacts" / "rewards" / iteration).glob("*.parquet"))
    rewards = [value for shard in shards for value in pq.read_table(shard)["reward"].to_pylist()]
    return sum(rewards) / len(rewards)


def test_artifacts(story: Story) -> None:
    found = story.scheduler.artifacts(story.runs["resumed"])
    for iteration in ("0001", "0002", "0003"):
        assert f"{mean_reward(story.project, iteration):.4f}".rstrip("0") in found[f"iteration-{iteration}"]["data"]
        assert "update (seconds)" in found[f"iteration-{iteration}"]["data"]
        assert "sample 3" in found[f"groups-{iteration}"]["data"]
        assert "(http://mlflow.example/#/experiments/7/runs/abc)" in found[f"mlflow-{iteration}"]["data"]


def test_the_ui_shows_run_and_metric(story: Story) -> None:
    run = story.runs["resumed"]
    name = story.scheduler.get(f"/flow_runs/{run}")["name"]
    page_text(f"{story.scheduler.ui}/runs/flow-run/{run}", name, "Completed", "iteration 0003")
    artifact = story.scheduler.artifacts(run)["iteration-0003"]
    reward = f"{mean_reward(story.project, '0003'):.4f}".rstrip("0")
    assert reward in page_text(f"{story.scheduler.ui}/artifacts/artifact/{artifact['id']}", "train reward", reward)


def test_the_ui_shows_any_text_as_it_is(story: Story) -> None:
    text = r"<img src=x> a | b \| \ &lt; [l](javascript:x) `c` **b** _i_ ~~s~~ https://e.example www.e.example $x$"
    table = f"| s0 | s1 |\n| --- | --- |\n| {artifacts.plain(text)} | last |"
    made = story.scheduler.post("/artifacts/", key="any-text", type="markdown", data=table)
    assert text in page_text(f"{story.scheduler.ui}/artifacts/artifact/{made['id']}", "last")


def test_nightly_is_scheduled(story: Story) -> None:
    nightly = story.scheduler.get("/deployments/name/rloo-training/nightly")
    assert nightly["parameters"] == {"extend_by": 4}
    assert [schedule["schedule"]["cron"] for schedule in nightly["schedules"]] == ["0 1 * * *"]
    assert set(nightly["parameter_openapi_schema"]["properties"]) >= {"iterations", "overrides", "target"}
