"""One GPU stage at a time on a machine."""

from pathlib import Path

import pytest

from rloo_pipeline import gpu
from rloo_pipeline.errors import Busy
from rloo_pipeline.layout import Layout


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(gpu, "SECONDS_TO_DIE", 0.0)


@pytest.mark.parametrize(
    ("visible", "expected"),
    [("1,0", ["0", "1"]), ("", []), ("-1", []), ("GPU-8f, MIG-a/1/0", ["GPU-8f", "MIG-a/1/0"]), ("2,2", ["2"])],
)
def test_devices(monkeypatch: pytest.MonkeyPatch, visible: str, expected: list[str]) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpu.devices() == expected


def test_two_projects_take_turns_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    refusal = rf"update 0001.*{tmp_path}/a.* runs on GPU 1 of this machine; wait.*run rollouts 0001 again"
    with gpu.exclusive(Layout(tmp_path / "a"), "update 0001"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,2")
        with pytest.raises(Busy, match=refusal), gpu.exclusive(Layout(tmp_path / "b"), "rollouts 0001"):
            raise AssertionError
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")
        with gpu.exclusive(Layout(tmp_path / "b"), "rollouts 0001"):
            pass
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    with gpu.exclusive(Layout(tmp_path / "b"), "rollouts 0001"):
        pass


def test_without_a_gpu_projects_run_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with gpu.exclusive(Layout(tmp_path / "a"), "update 0001"), gpu.exclusive(Layout(tmp_path / "b"), "update 0001"):
        assert not (tmp_path / "home").exists()
