"""From completions to the table of rewards."""

import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest

from rloo_pipeline.config import ExecutionConfig, RewardConfig
from rloo_pipeline.errors import UserError
from rloo_pipeline.reward_config import FunctionReward
from rloo_pipeline.rewards.score import NONE_APPLIES, join_prompts, score
from rloo_pipeline.schema import rewards_schema

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


def configs(root: Path, code: str, **weights: float) -> list[RewardConfig]:
    (root / "reward.py").write_text(code)
    return [FunctionReward(name=name, function=f"reward.py:{name}", weight=weight) for name, weight in weights.items()]


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
        "async def short(completion_ids, completions, **kwargs):\n"
        "    return [None if c in 'b?' else 0.25 for c in completions]\n"
    )
    rows = join_prompts(rollouts(["second", "first", "second", "first"], ["b", "b", "a", "?"]), PROMPTS)
    scored = score(configs(tmp_path, code, right=1.0, short=2.0), rows, tmp_path, ExecutionConfig(), global_step=1)
    assert scored.schema.equals(rewards_schema(["right", "short"]), check_metadata=True)
    expected = [
        ("second", 0, 1.0, None, 1.0, None),
        ("first", 0, 0.0, None, 0.0, None),
        ("second", 1, 0.0, 0.25, 0.5, None),
        ("first", 1, None, None, None, NONE_APPLIES),
    ]
    assert [tuple(row.values())[1:] for row in scored.to_pylist()] == expected
    assert scored["iteration"].to_pylist() == [2] * 4


def test_global_step_reaches_the_function(tmp_path: Path) -> None:
    code = "def step(trainer_state, prompts, **kwargs):\n    return [trainer_state.global_step] * len(prompts)\n"
    rows = join_prompts(rollouts(["first"], ["x"]), PROMPTS)
    scored = score(configs(tmp_path, code, step=1.0), rows, tmp_path, ExecutionConfig(), global_step=7)
    assert scored["reward"].to_pylist() == [7.0]


def test_a_sum_that_is_not_finite(tmp_path: Path) -> None:
    code = "def big(prompts, **kwargs):\n    return [1e30] * len(prompts)\n"
    rows = join_prompts(rollouts(["first"], ["x"]), PROMPTS)
    with pytest.raises(UserError, match="weighted sum is not finite in float32; lower the weights"):
        score(configs(tmp_path, code, big=1e30), rows, tmp_path, ExecutionConfig(), global_step=0)


def test_functions_alone_need_no_torch() -> None:
    code = (
        "import sys\n"
        "import rloo_pipeline.rewards.score, rloo_pipeline.data.load, rloo_pipeline.data.prompts\n"
        "import rloo_pipeline.data.select, rloo_pipeline.data.filter, rloo_pipeline.data.template\n"
        "print([name for name in ('torch', 'transformers', 'datasets', 'vllm') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
