"""From completions to the table of rewards."""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from rloo_pipeline.config import ExecutionConfig, RewardConfig
from rloo_pipeline.errors import UserError
from rloo_pipeline.reward_config import FunctionReward, ModelReward
from rloo_pipeline.rewards.call import TrainerState
from rloo_pipeline.rewards.combine import NONE_APPLIES
from rloo_pipeline.rewards.kept import Counted, Kept, Shards
from rloo_pipeline.rewards.score import join_prompts, score_shards
from rloo_pipeline.rewards.scored import Scored
from rloo_pipeline.schema import rewards_schema
from rloo_pipeline.shards import read_table

PROMPTS = pa.table({"prompt_id": ["first", "second"], "prompt": ["p", "q"], "answer": ["a", "b"], "tags": [["t"], []]})


def rollouts(ids: list[str], texts: list[str]) -> pa.Table:
    return pa.table(
        {
            "iteration": pa.array([2] * len(ids), pa.int32()),
            "prompt_id": ids,
            "sample_index": pa.array([ids[:row].count(key) for row, key in enumerate(ids)], pa.int32()),
            "completion_text": texts,
            "completion_token_ids": pa.array([[1]] * len(ids), pa.list_(pa.int32())),
        }
    )


def functions(root: Path, code: str, **weights: float) -> list[RewardConfig]:
    (root / "reward.py").write_text(code)
    return [FunctionReward(name=name, function=f"reward.py:{name}", weight=weight) for name, weight in weights.items()]


def score(root: Path, configs: Sequence[RewardConfig], *shards: pa.Table) -> tuple[pa.Table, Counted]:
    """The rewards of the shards, and what was counted."""
    given = Shards(len(shards), lambda index: join_prompts(shards[index], PROMPTS))
    work = root / "work" / "key"
    entries = score_shards(configs, given, work, root, TrainerState(7), ExecutionConfig(reward_workers=1))
    return pa.concat_tables([read_table(work / file)[0] for file, _, _ in entries]), Kept(work).counted()


def test_wrong_answer() -> None:
    joined = join_prompts(rollouts(["first"] * 3 + ["second"] * 3, list("uvwxyz")), PROMPTS)
    assert joined["answer"].to_pylist() == ["a", "a", "a", "b", "b", "b"]
    assert joined["completion_text"].to_pylist() == list("uvwxyz")


def test_join_is_by_id_whatever_the_orders() -> None:
    joined = join_prompts(rollouts(["second", "first", "second"], list("xyz")), PROMPTS.take([1, 0]))
    assert joined.select(["prompt_id", "prompt", "answer", "tags"]).to_pylist() == [
        {"prompt_id": "second", "prompt": "q", "answer": "b", "tags": []},
        {"prompt_id": "first", "prompt": "p", "answer": "a", "tags": ["t"]},
        {"prompt_id": "second", "prompt": "q", "answer": "b", "tags": []},
    ]


def test_join_with_a_prompt_that_is_gone() -> None:
    with pytest.raises(UserError, match="prompt_id third: its completions are in the rollouts, but it is not among"):
        join_prompts(rollouts(["first", "third"], ["x", "y"]), PROMPTS)


def test_score(tmp_path: Path) -> None:
    code = (
        "def right(completions, answer, **kwargs):\n"
        "    return [None if c == '?' else float(c == a) for c, a in zip(completions, answer)]\n"
        "async def short(completion_ids, completions, log_extra, **kwargs):\n"
        "    log_extra('seen', completions)\n"
        "    return [None if c in 'b?' else 0.25 for c in completions]\n"
    )
    configs = functions(tmp_path, code, right=1.0, short=2.0)
    scored, _ = score(tmp_path, configs, rollouts(["second", "first", "second", "first"], ["b", "b", "a", "?"]))
    assert scored.schema.equals(rewards_schema(["right", "short"]))
    expected = [
        ("second", 0, 1.0, None, 1.0, None, '{"seen": "b"}'),
        ("first", 0, 0.0, None, 0.0, None, '{"seen": "b"}'),
        ("second", 1, 0.0, 0.25, 0.5, None, '{"seen": "a"}'),
        ("first", 1, None, None, None, NONE_APPLIES, '{"seen": "?"}'),
    ]
    assert [tuple(row.values())[1:] for row in scored.to_pylist()] == expected
    assert scored["iteration"].to_pylist() == [2] * 4


def test_the_column_is_what_float32_stores_before_the_clip(tmp_path: Path) -> None:
    code = "def big(prompts, trainer_state, **kwargs):\n    return [trainer_state.global_step + 0.1]\n"
    (config,) = functions(tmp_path, code, big=10.0)
    scored, _ = score(tmp_path, [config.model_copy(update={"clip": (-0.5, 0.5)})], rollouts(["first"], ["x"]))
    assert (scored["reward/big"].to_pylist(), scored["reward"].to_pylist()) == ([float(np.float32(7.1))], [5.0])


def test_what_float32_cannot_hold(tmp_path: Path) -> None:
    code = "def big(prompts, **kwargs):\n    return [1e30]\ndef huge(prompts, **kwargs):\n    return [-1e39]\n"
    big, huge = functions(tmp_path, code, big=1e30, huge=1.0)
    rows = rollouts(["first"], ["x"])
    with pytest.raises(
        UserError, match=r"sum of row 1, prompt_id first, .* is 1e\+60, which float32 cannot hold; lower"
    ):
        score(tmp_path, [big], rows)
    with pytest.raises(
        UserError, match=r"reward huge: gave -1e\+39, which float32 cannot hold \(row 1, prompt_id first"
    ):
        score(tmp_path, [huge], rows)


class Scorer:
    """Components that are no functions: their scores are letters' numbers, and what is opened and scored is told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.told: list[str] = []
        self.ends_at: str | None = None
        monkeypatch.setattr("rloo_pipeline.rewards.score._open_other", self.open)

    @contextmanager
    def open(self, config: Any, root: Path, execution: Any) -> Iterator[Any]:
        self.told.append(f"open {config.name}")
        yield lambda rows: self.score(config.name, rows)
        self.told.append(f"close {config.name}")

    def score(self, name: str, rows: pa.Table) -> Scored:
        texts = rows["completion_text"].to_pylist()
        if self.ends_at == f"{name} {texts}":
            raise KeyboardInterrupt
        self.told.append(f"{name} {''.join(texts)}")
        numbers = [np.nan if text == "z" else float(ord(text)) for text in texts]
        return Scored(np.array(numbers), {row: "is z" for row, text in enumerate(texts) if text == "z"})


def model(name: str, **settings: Any) -> RewardConfig:
    return ModelReward(name=name, model="any", **settings)


F = (
    "def f(completions, log_metric, **kwargs):\n"
    "    log_metric('n', len(completions))\n"
    "    return [1] * len(completions)\n"
)


def test_one_component_after_another_over_all_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ended in the second shard of the second model: nothing is scored again, and no model loaded for it."""
    scorer = Scorer(monkeypatch)
    configs = [model("one"), *functions(tmp_path, F, f=1.0), model("two", on_error="invalid", weight=0.5)]
    shards = rollouts(["first", "second"], ["a", "b"]), rollouts(["first"], ["z"]), rollouts(["second"], ["c"])
    configs[0] = configs[0].model_copy(update={"on_error": "invalid", "weight": 0.0})
    scorer.ends_at = "two ['z']"
    with pytest.raises(KeyboardInterrupt):
        score(tmp_path, configs, *shards)
    assert scorer.told == ["open one", "one ab", "one z", "one c", "close one", "open two", "two ab"]

    scorer.told, scorer.ends_at = [], None
    (tmp_path / "reward.py").unlink()
    scored, counted = score(tmp_path, configs, *shards)
    assert scorer.told == ["open two", "two z", "two c", "close two"]
    assert scored["reward/one"].to_pylist() == [97.0, 98.0, None, 99.0]
    assert scored["reward"].to_pylist() == [1 + 48.5, 1 + 49.0, None, 1 + 49.5]
    assert scored["reward_error"].to_pylist() == [None, None, "one: is z; two: is z", None]
    assert counted.errors == {"one": 1, "two": 1}
    assert counted.logged == {"n": pytest.approx((2 * 2 + 1 + 1) / 4)}


def test_tasks_route_models_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scorer = Scorer(monkeypatch)
    prompts = PROMPTS.append_column("task", pa.array(["math", "code"]))
    monkeypatch.setitem(globals(), "PROMPTS", prompts)
    shards = rollouts(["second", "first", "second"], ["a", "b", "c"]), rollouts(["first"], ["d"])
    scored, _ = score(tmp_path, [model("code", tasks=["code"]), model("all")], *shards)
    assert scorer.told == ["open code", "code ac", "close code", "open all", "all abc", "all d", "close all"]
    assert scored["reward/code"].to_pylist() == [97.0, None, 99.0, None]
    assert scored["reward"].to_pylist() == [2 * 97.0, 98.0, 2 * 99.0, 100.0]


def test_functions_alone_need_no_torch() -> None:
    code = (
        "import sys\n"
        "import rloo_pipeline.rewards.score, rloo_pipeline.data.load, rloo_pipeline.data.prompts\n"
        "import rloo_pipeline.data.select, rloo_pipeline.data.filter, rloo_pipeline.data.template\n"
        "print([name for name in ('torch', 'transformers', 'datasets', 'vllm') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_shard_that_is_scored_anew_leaves_no_older_note(tmp_path: Path) -> None:
    kept = Kept(tmp_path / "work")
    kept.note(0, {"a": Scored(np.array([np.nan]), {0: "broken"}, logged={"size": (6.0, 2)})})
    kept.note(1, {"a": Scored(np.array([np.nan]), {0: "broken"}, logged={"size": (2.0, 2)})})
    assert kept.counted() == Counted({"a": 2}, {"size": 2.0})
    kept.note(0, {"a": Scored(np.array([1.0]))})
    assert kept.counted() == Counted({"a": 1}, {"size": 1.0})
