"""A command dies with what started it, its children too."""

import subprocess
import sys
import time

import psutil
import pytest

from flows.dvc import LEASH

TREE = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
time.sleep(600)
"""
STARTER = f"""
import subprocess, sys, time
process = subprocess.Popen([sys.executable, {str(LEASH)!r}, sys.executable, "-c", {TREE!r}], stdin=subprocess.PIPE)
time.sleep(600)
"""


@pytest.mark.parametrize("how", ["kill", "terminate"])
def test_the_whole_tree_dies_with_the_starter(how: str) -> None:
    with subprocess.Popen([sys.executable, "-c", STARTER], stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        grandchild = psutil.Process(int(starter.stdout.readline()))
        tree = psutil.Process(starter.pid).children(recursive=True)
        assert grandchild in tree
        getattr(starter, how)()
        assert psutil.wait_procs(tree, timeout=10)[1] == []


@pytest.mark.parametrize(
    ("code", "expected"), [("raise SystemExit(7)", 7), ("import os; os.kill(os.getpid(), 9)", 137)]
)
def test_exit_status(code: str, expected: int) -> None:
    with subprocess.Popen([sys.executable, LEASH, sys.executable, "-c", code], stdin=subprocess.PIPE) as process:
        assert process.wait() == expected


def test_nothing_of_a_command_outlives_it() -> None:
    leaves = TREE.removesuffix("time.sleep(600)\n")
    command = [sys.executable, LEASH, sys.executable, "-c", leaves]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        left = int(process.stdout.readline())
        assert process.wait() == 0
        deadline = time.monotonic() + 10
        while psutil.pid_exists(left) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not psutil.pid_exists(left)
