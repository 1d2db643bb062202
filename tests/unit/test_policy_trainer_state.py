import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from rloo_pipeline.config import UpdateConfig
from rloo_pipeline.errors import UserError
from rloo_pipeline.policy.step import make_optimizer
from rloo_pipeline.policy.trainer_state import MOMENTS, keep, read_counters, restore, save, write_initial_state

CONFIG = UpdateConfig(learning_rate=1e-3)


def parameters(order=("matrix", "vector")):
    values = {"matrix": torch.ones(3, 2), "vector": torch.ones(2)}
    return {name: torch.nn.Parameter(values[name]) for name in order}


@pytest.fixture
def saved(tmp_path):
    """Moments after a step on a gradient of 2 for the matrix, 4 for the vector."""
    named = parameters()
    optimizer = make_optimizer(named, CONFIG)
    for value, parameter in zip((2.0, 4.0), named.values(), strict=True):
        parameter.grad = torch.full_like(parameter, value)
    optimizer.step()
    save(optimizer, named, tmp_path, 1)
    return tmp_path


def test_before_the_first_step(tmp_path):
    write_initial_state(tmp_path)
    named = parameters()
    optimizer = make_optimizer(named, CONFIG)
    assert restore(optimizer, named, tmp_path) == 0
    assert not optimizer.state


def test_kept_state_is_the_same_but_for_what_is_carried(saved, tmp_path):
    assert keep(saved, tmp_path / "next", {"beta": 0.5}) == 1
    assert (tmp_path / "next" / MOMENTS).read_bytes() == (saved / MOMENTS).read_bytes()
    assert read_counters(tmp_path / "next") == {"step": 1, "beta": 0.5}


def test_kept_state_before_the_first_step(tmp_path):
    write_initial_state(tmp_path / "0")
    assert keep(tmp_path / "0", tmp_path / "1") == 0
    assert [path.name for path in (tmp_path / "1").iterdir()] == ["state.json"]


def test_moments_are_those_of_adam(saved):
    """One step: the first moment is (1 - 0.9) g, the second (1 - 0.95) g^2."""
    moments = load_file(saved / "optimizer.safetensors")
    assert moments["exp_avg/matrix"].flatten().tolist() == pytest.approx([0.2] * 6)
    assert moments["exp_avg_sq/matrix"].flatten().tolist() == pytest.approx([0.2] * 6)
    assert moments["exp_avg/vector"].tolist() == pytest.approx([0.4] * 2)
    assert moments["exp_avg_sq/vector"].tolist() == pytest.approx([0.8] * 2)
    assert read_counters(saved) == {"step": 1}


def test_moments_go_by_name_whatever_the_order(saved):
    named = parameters(order=("vector", "matrix"))
    optimizer = make_optimizer(named, CONFIG)
    assert restore(optimizer, named, saved) == 1
    assert optimizer.state[named["matrix"]]["exp_avg"].flatten().tolist() == pytest.approx([0.2] * 6)
    assert optimizer.state[named["vector"]]["exp_avg"].tolist() == pytest.approx([0.4] * 2)
    assert optimizer.state[named["vector"]]["step"] == 1


@pytest.mark.parametrize("change", ["missing", "foreign"])
def test_moments_of_other_weights_are_refused(saved, change):
    moments = load_file(saved / "optimizer.safetensors")
    value = moments.pop("exp_avg/vector")
    if change == "foreign":
        moments["exp_avg/other"] = value
    save_file(moments, saved / "optimizer.safetensors")
    named = parameters()
    with pytest.raises(UserError, match=r"optimizer\.safetensors: exp_avg/(vector|other) and \d more do not fit"):
        restore(make_optimizer(named, CONFIG), named, saved)


@pytest.mark.parametrize("content", [None, "{broken"])
def test_broken_counters_are_told(tmp_path, content):
    if content is not None:
        (tmp_path / "state.json").write_text(content)
    with pytest.raises(UserError, match=r"state\.json: not readable"):
        read_counters(tmp_path)


def test_the_same_state_gives_the_same_bytes(saved, tmp_path):
    named = parameters()
    optimizer = make_optimizer(named, CONFIG)
    restore(optimizer, named, saved)
    save(optimizer, named, tmp_path / "again", 1)
    for name in ("optimizer.safetensors", "state.json"):
        assert (tmp_path / "again" / name).read_bytes() == (saved / name).read_bytes()
    assert json.loads((saved / "state.json").read_text()) == {"step": 1}
