"""A project tracked on a real MLflow server: read back through its client and seen in the browser."""

import json
import os
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from mlflow.tracking import MlflowClient

from rloo_pipeline.layout import Layout
from rloo_pipeline.tracking import run_id, run_url
from rloo_pipeline.tracking.find import find
from tests.browser import page_text
from tests.project import Project, environment

SECONDS_TO_START = 240


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of an MLflow server with a database and artifacts of its own."""
    folder = tmp_path_factory.mktemp("server")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    places = ["--backend-store-uri", f"sqlite:///{folder}/mlflow.db", "--artifacts-destination", str(folder / "store")]
    command = ["mlflow", "server", *places, "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    env = environment(MLFLOW_DISABLE_TELEMETRY="true")
    env.pop("MLFLOW_TRACKING_URI", None)
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            command, cwd=folder, env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        deadline = time.monotonic() + SECONDS_TO_START
        while not answers(url):
            assert process.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < deadline, "the server does not start"
            time.sleep(0.2)
        yield url
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture
def project(finished_project: Project, tmp_path: Path, server: str, monkeypatch: pytest.MonkeyPatch) -> Project:
    """A copy of the finished project whose shell names the server, with a password in the address."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.replace("http://", "http://me:s3cret@"))
    return finished_project.copy(tmp_path / "held out run")


def held_out_reward(project: Project, iteration: str) -> float:
    """The mean over prompts of the mean reward of their samples, from the rows themselves."""
    rows = pq.read_table(sorted((project.root / f"artifacts/evaluation/{iteration}").glob("*.parquet")))
    means = rows.group_by("prompt_id").aggregate([("reward", "mean")])["reward_mean"].to_pylist()
    return sum(means) / len(means)


def test_run_on_a_server_read_back_and_seen_in_the_browser(
    project: Project, server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outputs = [project.rloo("track", *options) for options in ((), ("--copy-models",), ())]
    layout = Layout(project.root)
    # Without the notes in the folder the server is asked.
    for name in (run_id(layout) or "")[:8], project.run("sha256sum", "dvc.lock").stdout[:64]:
        shutil.move(layout.state / "runs.json", tmp_path)
        assert find(layout, name).mlflow_run == json.loads((tmp_path / "runs.json").read_text())["runs"][-1]["run_id"]
        shutil.move(tmp_path / "runs.json", layout.state)
    address = run_url(layout)
    assert address is not None
    assert address.startswith(f"{server}/#/experiments/")
    assert all(address in output.stdout for output in outputs)
    assert not (project.root / "mlflow.db").exists()

    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    client = MlflowClient(server)
    (run,) = client.search_runs([client.get_experiment_by_name("rloo").experiment_id])
    assert address.endswith(run.info.run_id)
    histories = {key: client.get_metric_history(run.info.run_id, key) for key in run.data.metrics}
    steps = Counter((key, point.step) for key, history in histories.items() for point in history)
    assert set(steps.values()) == {1}
    rewards = {point.step: point.value for point in histories["evaluate/reward"]}
    expected = {number: held_out_reward(project, f"{number:04d}") for number in (0, 1, 2)}
    assert rewards == pytest.approx(expected, abs=1e-9)
    told = [str(run.to_dictionary()), (project.root / ".rloo/runs.json").read_text()]
    told += [output.stdout + output.stderr for output in outputs]
    assert not any("s3cret" in text for text in told)

    models = {model.name: model for model in client.search_logged_models([run.info.experiment_id])}
    assert len(models) == 3
    linked = {metric.key: metric.value for metric in models["policy-0002"].metrics}
    assert linked["evaluate/reward"] == rewards[2]
    stored = {file.path for file in client.list_logged_model_artifacts(models["policy-0002"].model_id)}
    assert {"MLmodel", "model.safetensors", "config.json"} <= stored

    # The overview shows the latest value of each metric.
    page_text(address, run.info.run_name, "evaluate/reward", str(rewards[2]), screenshot=tmp_path / "run.png")
