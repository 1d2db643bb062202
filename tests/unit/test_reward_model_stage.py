"""The stage reward_model: whatever a user can get wrong is told with its place and its remedy."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rloo_pipeline.config import Params, parse_params
from rloo_pipeline.errors import UserError
from rloo_pipeline.layout import Layout, reward_model_at
from rloo_pipeline.rewards.model import token_ids
from rloo_pipeline.sources import check_listed, fingerprints
from rloo_pipeline.stages import dispatch
from rloo_pipeline.stages import sources as sources_stage
from rloo_pipeline.stages.context import algorithm_version
from tests.enumeration import one_thread
from tests.project import PARAMS
from tests.tiny import make_model, make_policy, make_tokenizer

PAIRS = [{"prompt": f"{letter}: ", "chosen": letter * 3, "rejected": "no"} for letter in "abcdefgh"]
SETTINGS: dict[str, Any] = {
    "model": "tiny", "train": {"file": "pairs.jsonl"}, "eval": {"file": "pairs.jsonl"}, "learning_rate": 1e-3,
    "batch_size": 4, "steps": 2,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_policy(tmp_path_factory.mktemp("base") / "tiny")


@pytest.fixture
def layout(tmp_path: Path, tiny: Path) -> Layout:
    (tmp_path / "tiny").symlink_to(tiny)
    write(tmp_path, PAIRS)
    return Layout(tmp_path)


def write(root: Path, rows: list[dict[str, Any]]) -> None:
    (root / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def params_of(**changes: Any) -> Params:
    sources = {"pairs": {"path": "pairs.jsonl", "used_by": "reward_models"}}
    return parse_params({**PARAMS, "sources": sources, "reward_models": {"quality": SETTINGS | changes}})


def run(layout: Layout, **changes: Any) -> dict[str, Any]:
    dispatch.run("reward_model", layout, params_of(**changes), "quality")
    metrics: dict[str, Any] = json.loads(layout.metrics("reward_model", "quality").read_text())
    return metrics


def test_what_is_left_out_is_counted_with_reasons(layout: Layout) -> None:
    rows = [
        *PAIRS,
        {"prompt": "a", "chosen": "b", "rejected": "b"},
        {"prompt": "a", "chosen": "b" * 60, "rejected": ""},
    ]
    write(layout.root, rows)
    metrics = run(layout, max_tokens=40, train={"file": "pairs.jsonl", "where": {"rejected": ["no", "b", ""]}})
    assert metrics["train_pairs"] == metrics["eval_pairs"] == metrics["eval_pairs_also_in_train"] == 8
    assert metrics["train_pairs_filtered/identical"] == metrics["train_pairs_filtered/too_long"] == 1
    provenance = json.loads(layout.provenance("reward_model", "quality").read_text())
    assert provenance["train_filtered"]["train-000009"] == "too long: 61 tokens with chosen, the limit is 40"
    assert provenance["initialized"] == ["score.weight"]
    assert provenance["inputs"].keys() == {"source:pairs.jsonl"}


def test_calibration_stands_in_the_metrics(layout: Layout) -> None:
    metrics = run(layout)
    bins = {key.split("/")[1] for key in metrics if key.startswith("calibration/")}
    assert sum(metrics[f"calibration/{name}/pairs"] for name in bins) == 8
    error = sum(
        metrics[f"calibration/{name}/pairs"]
        * abs(metrics[f"calibration/{name}/accuracy"] - metrics[f"calibration/{name}/confidence"])
        for name in bins
    )
    assert metrics["calibration_error"] == pytest.approx(error / 8)
    assert metrics["accuracy_low"] <= metrics["accuracy"] <= metrics["accuracy_high"]


def test_a_model_that_scores_nan_is_not_kept(layout: Layout) -> None:
    """A token that only the held-out pairs have is NaN, so no gradient tells of it."""
    (layout.root / "tiny").unlink()
    model = make_model()
    with torch.no_grad():
        model.model.embed_tokens.weight[make_tokenizer()("z")["input_ids"][0]] = torch.nan
    model.save_pretrained(layout.root / "tiny")
    make_tokenizer().save_pretrained(layout.root / "tiny")
    held_out = {"prompt": "z", "chosen": "a", "rejected": "b"}
    (layout.root / "eval.jsonl").write_text(json.dumps(held_out) + "\n")
    with pytest.raises(UserError, match="the trained model scores NaN; lower learning_rate"):
        run(layout, eval={"file": "eval.jsonl"})
    assert not layout.reward_model("quality").exists()


def test_tokens_are_those_that_the_reward_stage_will_score(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    """Conversations whose prompt is within both completions, against rows as a rollout makes them."""
    from rloo_pipeline.preference import train

    question = {"role": "user", "content": "Say a"}
    answers = [{"role": "assistant", "content": text} for text in ("a!", "no")]
    write(layout.root, [{"chosen": [question, answers[0]], "rejected": [question, answers[1]]}])
    seen = []
    original = train.accumulate
    monkeypatch.setattr(train, "accumulate", lambda *a: seen.append(a[1]) or original(*a))
    run(layout, batch_size=1, steps=1)
    import pyarrow as pa

    scored = pa.table({"prompt": [[question]] * 2, "completion_text": ["a!", "no"]})
    expected = token_ids(scored, make_tokenizer())
    assert [seen[0].chosen_N[0], seen[0].rejected_N[0]] == expected


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": 300}, r"reward_models\.quality\.max_tokens is 300, but the base takes 256; lower it"),
    ({"max_tokens": 4}, r"reward_models\.quality\.train: none of 8 pairs can be used: 8 too long; give others"),
    ({"batch_size": 9}, r"reward_models\.quality\.batch_size is 9, but there are 8 pairs to train on; lower it"),
    ({"model": "./gone"}, r"reward_models\.quality\.model \./gone: no such directory below"),
    ({"model": "package:gone"}, r"reward_models\.quality\.model package:gone: the Python package gone is not"),
    ({"train": {"file": "gone.jsonl"}}, r"reward_models\.quality\.train: .*gone\.jsonl: no such file"),
    ({"eval": {"fraction": 0.001}}, r"reward_models\.quality\.eval\.fraction 0\.001: of 8 pairs 0 would be held out"),
]


@pytest.mark.parametrize(("changes", "told"), WRONG)
def test_what_is_wrong_is_told(layout: Layout, changes: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError, match=told):
        run(layout, **changes)
    assert not layout.reward_model("quality").exists()


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"epochs": 1}, "reward_models.quality: name exactly one of steps and epochs"),
        ({"warmup_steps": 2}, r"reward_models.quality: warmup_steps \(2\) must be less than steps \(2\)"),
        ({"train": {"fraction": 0.5}}, "only eval can be a fraction"),
        ({"model": "artifacts/reward_models/other"}, "made by this project, and DVC would see a circle; copy the"),
    ],
)
def test_settings_that_cannot_be(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError, match=told):
        params_of(**changes)


@pytest.mark.parametrize("name", ["0001", "a.b", "..", "a/b", ""])
def test_names_that_dvc_or_a_chain_would_misread(name: str) -> None:
    with pytest.raises(UserError, match="reward_models"):
        parse_params({**PARAMS, "reward_models": {name: SETTINGS}})


def test_an_unknown_name(layout: Layout) -> None:
    with pytest.raises(UserError, match=r"reward_model other: .* no such entry under reward_models; it has quality"):
        dispatch.run("reward_model", layout, params_of(), "other")


def listed(*sources: dict[str, str], model: str = "artifacts/reward_models/quality") -> Params:
    named = {f"s{index}": source for index, source in enumerate(sources)}
    rewards = [{"name": "quality", "model": model}]
    values = {**PARAMS, "policy": {"model": "hub/policy"}, "prompts": {"train": {"hub": "a", "split": "b"}}}
    values["prompts"]["eval"] = {"fraction": 0.5}
    reward_models = {"quality": SETTINGS}
    return parse_params({**values, "sources": named, "rewards": rewards, "reward_models": reward_models})


OWN = ({"path": "tiny", "used_by": "reward_models"}, {"path": "pairs.jsonl", "used_by": "reward_models"})
TRAINED = {"path": "artifacts/reward_models/quality", "used_by": "rewards"}


def test_sources_before_the_model_is_there(layout: Layout) -> None:
    params = listed(*OWN, TRAINED)
    check_listed(params, layout.root)
    with pytest.raises(UserError, match="artifacts/reward_models/quality: not trained yet; `dvc repro` trains"):
        fingerprints(params.sources, "rewards", layout.root)
    with pytest.raises(UserError, match=r"sources\.s2\.path: artifacts/reward_models/quality: not trained yet"):
        sources_stage.run(layout, "s2", params.sources["s2"])


def test_files_of_a_reward_model_must_be_listed(layout: Layout) -> None:
    with pytest.raises(UserError, match=r"reward_models\.quality\.model names tiny, which `sources` does not list"):
        check_listed(listed(OWN[1], TRAINED), layout.root)
    with pytest.raises(UserError, match=r"reward_models\.quality\.train names pairs\.jsonl, which"):
        check_listed(listed(OWN[0], TRAINED), layout.root)
    with pytest.raises(UserError, match="rewards, quality names artifacts/reward_models/quality, which `sources` does"):
        check_listed(listed(*OWN), layout.root)
    with pytest.raises(UserError, match="but reward_models has no other; it has quality"):
        check_listed(listed(*OWN, TRAINED, model="artifacts/reward_models/other"), layout.root)


def test_where_reward_models_lie() -> None:
    assert reward_model_at(Path("./artifacts/reward_models/quality/")) == "quality"
    for other in ("artifacts/reward_models", "artifacts/reward_models/a/b", "models/quality", "/artifacts/x"):
        assert reward_model_at(Path(other)) is None


# Results of number 1 in algorithms.yaml: raise the number when they change, and write the new ones here.
BEHAVIOUR = {
    "version": 1, "loss": 0.444434, "margin": 1.811714, "brier": 0.109524, "grad_norm": 13.16366,
    "train_loss": 0.713346,
}  # fmt: skip


def test_behaviour_of_the_stage(layout: Layout) -> None:
    rows = [{**row, "margin": 0.1 * index} for index, row in enumerate(PAIRS)]
    write(layout.root, rows)
    metrics = run(layout, steps=5, warmup_steps=1, weight_decay=0.1, learning_rate=1e-4)
    found = {"version": algorithm_version("reward_model"), **{key: metrics[key] for key in BEHAVIOUR if key in metrics}}
    assert found == pytest.approx(BEHAVIOUR, rel=1e-3)
