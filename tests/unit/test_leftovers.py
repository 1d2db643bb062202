"""Which leftovers go, which stay, and what is said of them."""

import copy
import io
import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from rloo_pipeline import leftovers, process
from rloo_pipeline.cli import main
from rloo_pipeline.config import Params, parse_params
from rloo_pipeline.errors import Busy
from rloo_pipeline.layout import Layout
from rloo_pipeline.stages.context import Record, make_context, start
from tests.project import PARAMS


def params(**sections: Any) -> Params:
    """The tests' params with keys of sections changed."""
    values = copy.deepcopy(PARAMS)
    for name, changes in sections.items():
        values[name] = changes if not isinstance(changes, dict) else values[name] | changes
    return parse_params(values)


def partial(layout: Layout, stage: str, settings: Params, iteration: str = "0001") -> Path:
    """Partial output of a stage: one shard of 100 bytes, which is returned."""
    context = make_context(settings, layout, iteration, initial=stage == "evaluate")
    if stage == "rewards":
        dumped = {"rewards": [reward.model_dump(mode="json") for reward in settings.rewards]}
        record = Record(context, stage, {"rollouts": "a"}, dumped)
    elif stage == "evaluate":
        sampling = settings.evaluate.model_dump(mode="json", exclude={"pass_k"})
        record = Record(context, stage, {"policy": "a"}, {"sampling": sampling})
    else:
        record = start(context, stage, getattr(settings, stage), {"policy": "a"})
    return write(record.work / "shard-00000.parquet")


def write(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x" * 100)
    return path


def cleaned(layout: Layout, settings: Params, capsys: pytest.CaptureFixture[str], **options: bool) -> list[str]:
    """The lines that the command writes."""
    leftovers.clean(layout, settings, **{"everything": False, "dry_run": False, **options})
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("stage", ["rollouts", "logprobs", "rewards", "advantages", "evaluate"])
def test_what_the_next_run_goes_on_from_stays_unless_asked(
    stage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layout = Layout(tmp_path)
    shard = partial(layout, stage, params())
    assert cleaned(layout, params(), capsys) == ["0 removed, 0 bytes"]
    assert cleaned(layout, params(evaluate={"pass_k": [1]}), capsys) == ["0 removed, 0 bytes"]
    assert shard.exists()
    *lines, last = cleaned(layout, params(), capsys, everything=True)
    assert [line.split(": ")[1].split(",")[0] for line in lines] == ["partial output"] * 2
    assert last.startswith("2 removed, ")
    assert not list(tmp_path.glob(".rloo/work/*/*/*"))


OTHER = {
    "rollouts": {"temperature": 0.5},
    "logprobs": {"dtype": "bfloat16"},
    "rewards": [{"name": "other", "function": "reward.py:score"}],
    "advantages": {"beta": 0.3},
    "evaluate": {"temperature": 0.5},
}


@pytest.mark.parametrize("stage", OTHER)
def test_what_other_settings_made_goes(stage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layout = Layout(tmp_path)
    old, new = partial(layout, stage, params()), partial(layout, stage, params(**{stage: OTHER[stage]}))
    lines = cleaned(layout, params(**{stage: OTHER[stage]}), capsys)
    assert f"{old.parent.relative_to(tmp_path)}: made under other settings of " in lines[0]
    assert lines[0].endswith(", 100 bytes")
    assert (old.exists(), new.exists()) == (False, True)


def test_another_seed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shard = partial(Layout(tmp_path), "rollouts", params())
    assert "made under another seed" in cleaned(Layout(tmp_path), params(seed=4), capsys)[0]
    assert not shard.exists()


def test_what_is_never_gone_on_from_goes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layout = Layout(tmp_path)
    context = make_context(params(), layout, "0001")
    update = write(start(context, "update", params().update, {}).work / "model" / "model.safetensors")
    gone = {
        write(tmp_path / ".rloo/work/rollouts/0001/abc.retired/shard-00000.parquet"): "replaced artifact",
        write(tmp_path / ".rloo/work/rollouts/0001/abc.records/metrics.json"): "half-written records",
        write(tmp_path / ".rloo/work/rollouts/0007/abc/shard-00000.parquet"): "params.yaml has no iteration 0007",
        write(tmp_path / "metrics/rollouts/.0001.json.tmp"): "half-written file",
        write(tmp_path / ".rloo/verify-a1b2c3/update-0001/metrics/update/0001.json"): "a killed verify",
        write(tmp_path / ".rloo/pruned/0/model.safetensors"): "a killed prune",
        update: "update starts over",
    }
    kept = [
        write(tmp_path / "artifacts/rollouts/0001/shard-00000.parquet"),
        write(tmp_path / ".rloo/work/rollouts/0001/of-no-known-key/shard-00000.parquet"),
        write(tmp_path / "notes.tmp"),
        write(tmp_path / ".rloo/replayed-a1b2c3/update-0001/metrics/update/0001.json"),  # of `verify --keep`
    ]
    lines = cleaned(layout, params(), capsys, dry_run=True)
    assert all(path.exists() for path in gone)
    assert lines[-1].startswith(f"{len(gone) + 1} would be removed")
    assert cleaned(layout, params(), capsys)[:-1] == lines[:-1]
    assert not any(path.exists() for path in gone)
    assert all(path.exists() for path in kept)
    for reason in gone.values():
        assert any(reason in line for line in lines)


def test_files_linked_into_the_cache_free_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / ".rloo/work/rollouts/0001/abc.retired/shard-00000.parquet")
    os.link(path, tmp_path / "cached")
    assert cleaned(Layout(tmp_path), params(), capsys)[-1] == "1 removed, 0 bytes"


def test_never_while_a_stage_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "SECONDS_TO_DIE", 0.0)
    shard = partial(Layout(tmp_path), "rollouts", params())
    with process.exclusive(Layout(tmp_path), "update 0001"), pytest.raises(Busy, match="update 0001"):
        cleaned(Layout(tmp_path), params(), capsys, everything=True)
    assert shard.exists()


@pytest.mark.parametrize(
    ("stream", "arguments"), [("stdout", ["clean", "--dry-run"]), ("stderr", ["sources", "\u00e9"])]
)
def test_a_locale_without_a_character_shows_its_number(
    stream: str, arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "params.yaml").write_text(json.dumps(PARAMS))
    write(tmp_path / ".rloo/verify-\u00e9/0001.json")
    written = io.BytesIO()
    monkeypatch.setattr(sys, stream, io.TextIOWrapper(written, encoding="ascii", write_through=True))
    monkeypatch.setattr(sys, "argv", ["rloo", *arguments])
    monkeypatch.chdir(tmp_path)
    with mock.patch.dict(os.environ), pytest.raises(SystemExit):
        main()
    assert b"\\xe9" in written.getvalue()
