"""No stage after `prepare` needs the network, or asks for anything outside this machine."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rloo_pipeline.layout import STAGES
from tests.project import REPOSITORY, Project, environment

# Runs the stages in one process and tells every name asked for and every address connected to outside this machine.
SCRIPT = """
import json, socket, sys
from pathlib import Path

outside = []

def watch(event, arguments):
    if event == "socket.connect" and arguments[0].family != socket.AF_UNIX:
        asked = arguments[1][0]
    elif event == "socket.getaddrinfo":
        asked = arguments[0]
    else:
        return
    if asked not in (None, "", "localhost", "127.0.0.1", "::1", "0.0.0.0", socket.gethostname()):
        outside.append(str(asked))

sys.addaudithook(watch)
from rloo_pipeline.config import load_params
from rloo_pipeline.layout import Layout
from rloo_pipeline.stages import dispatch

if __name__ == "__main__":
    params, layout = load_params(Path("params.yaml")), Layout(Path())
    for stage in sys.argv[1:]:
        dispatch.run(stage, layout, params, "0001")
    interfaces = [name for _, name in socket.if_nameindex()]
    Path("asked.json").write_text(json.dumps({"outside": outside, "interfaces": interfaces}))
"""


def run_alone(project: Project, *stages: str) -> None:
    """Run stages in a network namespace whose only interface is the loopback; skips where none can be made."""
    start = ["unshare", "--map-root-user", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    try:
        tried = subprocess.run([*start, "true"], capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        pytest.skip(f"no network namespace can be made here: {error}")
    if tried.returncode:
        pytest.skip(f"no network namespace can be made here: {tried.stderr.strip()}")
    (project.root / "alone.py").write_text(SCRIPT)
    # As without our command line, which tells the hub's client to stay offline.
    settings = environment(PYTHONPATH=str(REPOSITORY))
    del settings["HF_HUB_OFFLINE"]
    command = [*start, sys.executable, "alone.py", *stages]
    done = subprocess.run(
        command, cwd=project.root, env=settings, capture_output=True, text=True, timeout=500, check=False
    )
    if done.returncode and (reason := re.search("engine vllm is asked for, but .*", done.stderr)):
        pytest.skip(reason[0])
    assert done.returncode == 0, done.stderr[-4000:]
    assert json.loads((project.root / "asked.json").read_text()) == {"outside": [], "interfaces": ["lo"]}


@pytest.fixture
def prepared(finished_project: Project, tmp_path: Path) -> Project:
    """What is there after `prepare` and the evaluation of the initial policy."""
    project = finished_project.copy(tmp_path / "project")
    for path in (project.root / "artifacts").glob("*/000[12]"):
        shutil.rmtree(path)
    shutil.rmtree(project.root / ".rloo")
    return project


def files(project: Project, folder: str) -> dict[str, bytes]:
    root = project.root / folder
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_a_whole_iteration_without_network(prepared: Project, finished_project: Project) -> None:
    run_alone(prepared, *[stage for stage in STAGES if stage != "prepare"])
    for stage in ("rollouts", "logprobs", "rewards", "advantages", "policy", "evaluation"):
        folder = f"artifacts/{stage}/0001"
        assert files(prepared, folder) == files(finished_project, folder)


@pytest.mark.vllm
def test_vllm_without_network(prepared: Project) -> None:
    prepared.change("rollouts.engine", "vllm")
    run_alone(prepared, "rollouts", "logprobs")
    assert prepared.json("provenance/rollouts/0001.json")["engine"]["engine"] == "vllm"
    assert prepared.json("metrics/logprobs/0001.json")["sampler_gap/token_max"] < 1e-3
