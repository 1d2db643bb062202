"""Differences of two iterations written by hand, against counts and figures worked out by hand."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from rloo_pipeline.audit.diff import compare
from rloo_pipeline.audit.diff_report import show
from rloo_pipeline.audit.revision import Side
from rloo_pipeline.errors import UserError
from rloo_pipeline.files import write_json
from rloo_pipeline.layout import Layout
from rloo_pipeline.schema import KEY_NAMES
from rloo_pipeline.shards import write_shards, write_shards_manifest
from tests.rewriting import edit_json

STAGES = ("rollouts", "logprobs", "rewards", "advantages", "update", "evaluate")
HOSTILE = "[bold red]x[/bold red]\x1b[31m\u202e"


def provenance(output: str, settings: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"algorithm_version": 1, "device": "cpu", "inputs": {"policy": output}, "output": output,
            "settings": settings, "seed": 1, "versions": {"torch": "2"}, **more}  # fmt: skip


class Written:
    """An iteration's files, as much of them as a comparison reads."""

    def __init__(self, root: Path, iteration: str) -> None:
        self.side = Side(f"{root.name}:{iteration}", iteration, Layout(root), None)
        for stage in STAGES:
            self.record(stage, provenance(f"{stage} 1", {stage: {"rate": 0.1}}))

    def record(self, stage: str, value: dict[str, Any], metrics: dict[str, Any] | None = None) -> None:
        of = {"stage": stage, "iteration": self.side.iteration}
        write_json(self.side.layout.provenance(stage, self.side.iteration), {**value, **of})
        write_json(self.side.layout.metrics(stage, self.side.iteration), metrics or {})

    def rows(self, stage: str, rows: list[tuple[Any, ...]], *columns: pa.Field) -> None:
        keys = [pa.field(name, kind) for name, kind in
                zip(KEY_NAMES, (pa.int32(), pa.string(), pa.int32()), strict=True)]  # fmt: skip
        schema = pa.schema([*keys, *columns])
        full = [(int(self.side.iteration), *row) for row in rows]
        table = pa.Table.from_pylist([dict(zip(schema.names, row, strict=True)) for row in full], schema)
        entries = write_shards(self.side.rows(stage), 1, lambda _: table, schema)
        edit_json(
            self.side.layout.provenance(stage, self.side.iteration),
            output=write_shards_manifest(self.side.rows(stage), entries, {}),
        )

    def rollouts(self, rows: list[tuple[str, int, str, list[int], str]]) -> None:
        text, ids = pa.field("prompt_text", pa.string()), pa.field("completion_token_ids", pa.list_(pa.int32()))
        self.rows("rollouts", rows, text, ids, pa.field("completion_text", pa.string()))

    def rewards(self, rows: list[tuple[str, int, float | None]]) -> None:
        self.rows("rewards", rows, pa.field("reward", pa.float32()))


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Written, Written]:
    return Written(tmp_path / "a", "0001"), Written(tmp_path / "b", "0002")


def test_prompts_as_sets_and_completions_by_prompt_and_sample(pair: tuple[Written, Written]) -> None:
    a, b = pair
    a.rollouts([("p", 0, "P", [1, 2, 3], "abc"), ("p", 1, "P", [4], "d"), ("q", 0, "Q", [5], "e"),
                ("r", 0, "R", [1, 2], "ab")])  # fmt: skip
    # Another order; p 1 has one token more, r 0 two other ones, and the text of prompt r is another.
    b.rollouts([("r", 0, "R2", [7, 8], "xy"), ("p", 1, "P", [4, 9], "dz"), ("p", 0, "P", [1, 2, 3], "abc"),
                ("s", 0, "S", [5], "e")])  # fmt: skip
    found = compare(a.side, b.side, 5)
    assert found["prompts"] == {"a": 3, "b": 3, "shared": 2, "text_differs": 1, "only_a": ["q"], "only_b": ["s"]}
    assert found["completions"] == {
        "a": 4, "b": 4, "shared": 3, "different": 2,
        "examples": [
            {"prompt_id": "r", "sample_index": 0, "tokens_different": 2, "first_token": 0, "a": "ab", "b": "xy"},
            {"prompt_id": "p", "sample_index": 1, "tokens_different": 1, "first_token": 1, "a": "d", "b": "dz"},
        ],
    }  # fmt: skip
    limited = compare(a.side, b.side, 1)["completions"]
    assert (limited["different"], limited["examples"]) == (2, found["completions"]["examples"][:1])


def test_rewards_by_row_and_by_distribution(pair: tuple[Written, Written]) -> None:
    a, b = pair
    for written in pair:
        written.rollouts([("p", 0, "P", [1], "a")])
    a.rewards([("p", 0, 1.0), ("p", 1, 0.0), ("p", 2, None), ("p", 3, 0.5), ("q", 0, 2.0)])
    b.rewards([("p", 0, 0.75), ("p", 1, 0.0), ("p", 2, 3.0), ("p", 3, -0.5)])
    column = compare(a.side, b.side, 5)["columns"]["rewards.reward"]
    assert (column["shared"], column["different"], column["largest"]) == (4, 3, 1.0)
    assert [(e["sample_index"], e["a"], e["b"], e["difference"]) for e in column["examples"]] == [
        (3, 0.5, -0.5, 1.0), (0, 1.0, 0.75, 0.25), (2, None, 3.0, None),
    ]  # fmt: skip
    # 0, 0.5, 1, 2: mean 3.5/4; squared deviations .765625 + .140625 + .015625 + 1.265625 = 2.1875, over 3.
    assert column["a"] == pytest.approx(
        {"rows": 5, "null": 1, "mean": 0.875, "std": (2.1875 / 3) ** 0.5, "min": 0, "p25": 0.375, "median": 0.75,
         "p75": 1.25, "max": 2}
    )  # fmt: skip


def test_settings_once_with_the_stages_they_are_of(pair: tuple[Written, Written]) -> None:
    a, b = pair
    for stage in ("rewards", "evaluate"):
        b.record(stage, provenance("2", {stage: {"rate": 0.1}}, versions={"torch": "3"}))
    b.record("update", provenance("2", {"update": {"rate": 0.2}}, seed=2))
    a.record("rewards", provenance("1", {"rewards": {"rate": 0.1}}) | {"inputs": {"source:r.py": "old"}})
    found = compare(a.side, b.side, 5)
    assert sorted(found["settings"], key=lambda item: item["name"]) == [
        {"name": "seed", "a": 1, "b": 2, "stages": ["update"]},
        {"name": "source:r.py", "a": "old", "b": None, "stages": ["rewards"]},
        {"name": "update.rate", "a": 0.1, "b": 0.2, "stages": ["update"]},
        {"name": "versions.torch", "a": "2", "b": "3", "stages": ["rewards", "evaluate"]},
    ]
    assert {stage: item["same"] for stage, item in found["stages"].items()} == dict.fromkeys(
        ("rollouts", "logprobs", "advantages"), True
    ) | dict.fromkeys(("rewards", "update", "evaluate"), False)


def test_metrics_the_largest_first_and_rounding_last(pair: tuple[Written, Written]) -> None:
    a, b = pair
    a.record("update", provenance("1", {}), {"tokens": 100, "loss": 0.5, "mean": 1e-18, "same": 3, "gone": 1})
    b.record("update", provenance("1", {}), {"tokens": 110, "loss": 0.1, "mean": -1e-18, "same": 3})
    metrics = compare(a.side, b.side, 5)["metrics"]
    assert [(m["name"], m["a"], m["b"]) for m in metrics] == [
        ("update.loss", 0.5, 0.1),
        ("update.tokens", 100, 110),
        ("update.mean", 1e-18, -1e-18),
        ("update.gone", 1, None),
    ]
    assert metrics[1]["scaled"] == pytest.approx(10 / 110)
    assert metrics[0]["scaled"] == metrics[0]["difference"] == pytest.approx(0.4)


def test_what_is_not_there_is_said(pair: tuple[Written, Written]) -> None:
    a, b = pair
    a.rollouts([("p", 0, "P", [1], "a")])
    found = compare(a.side, b.side, 5)
    assert "prompts" not in found
    assert set(found["left_out"]) == {"rollouts of b:0002: not there"} | {
        f"{stage} of {name}: not there" for stage in ("rewards", "advantages") for name in ("a:0001", "b:0002")
    }
    with pytest.raises(UserError, match="no provenance of iteration 0009"):
        compare(a.side, Side("0009", "0009", b.side.layout, None), 5)


def test_text_of_models_and_data_is_escaped(
    pair: tuple[Written, Written], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setenv("FORCE_COLOR", "1")
    a, b = pair
    for number, written in enumerate(pair):
        written.rollouts([(HOSTILE, 0, "P", [number], HOSTILE + str(number)), (f"{HOSTILE}{number}", 0, "P", [1], "a")])
        written.record("update", provenance("1", {HOSTILE: f"{HOSTILE}{number}"}), {HOSTILE: number})
    result = compare(a.side, b.side, 5)
    show(result, 5)
    said = capsys.readouterr().out
    assert "\u202e" not in said
    assert "\x1b[31m" not in said
    assert said.count("[bold red]x[/bold red]\\x1b[31m\\u202e") == 9
    assert json.loads(json.dumps(result)) == result
