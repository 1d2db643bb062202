"""Our reward functions' arguments against those of a running RLOOTrainer, and TRL's own rewards unchanged."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from datasets import Dataset

from rloo_pipeline.data.prompts import MESSAGES
from rloo_pipeline.reward_config import FunctionReward
from rloo_pipeline.rewards.functions import TrainerState, arguments, score_functions
from tests.tiny import make_model, make_tokenizer

trl = pytest.importorskip("trl", reason="needs trl, from the extra 'test'")


def given_by_trl(directory: Path, data: list[dict[str, Any]]) -> dict[str, Any]:
    """Keyword arguments of the first call of a reward function."""
    seen: list[dict[str, Any]] = []

    def reward(**kwargs: Any) -> list[float]:
        seen.append({**kwargs, "trainer_state": kwargs["trainer_state"].global_step})
        return [float(row) for row in range(len(kwargs["prompts"]))]

    args = trl.RLOOConfig(
        output_dir=str(directory), num_generations=2, per_device_train_batch_size=4, max_completion_length=4,
        max_steps=1, use_cpu=True, report_to=[], bf16=False, disable_tqdm=True, save_strategy="no", beta=0.0,
        shuffle_dataset=False,
    )  # fmt: skip
    trainer = trl.RLOOTrainer(make_model(), reward, args, Dataset.from_list(data), processing_class=make_tokenizer())
    trainer.train()
    return seen[0]


def as_rows(given: dict[str, Any], conversational: bool) -> pa.Table:
    """The table that this pipeline holds for the same completions."""
    completions = given["completions"]
    texts = [completion[0]["content"] for completion in completions] if conversational else completions
    return pa.table(
        {
            "prompt_id": ["any"] * len(texts),
            "sample_index": pa.array(range(len(texts)), pa.int32()),
            "completion_text": texts,
            "completion_token_ids": pa.array(given["completion_ids"], pa.list_(pa.int32())),
            "prompt": pa.array(given["prompts"], MESSAGES if conversational else pa.string()),
            "answer": given["answer"],
            "tags": given["tags"],
        }
    )


@pytest.mark.parametrize("conversational", [False, True])
def test_arguments_are_those_of_rloo_trainer(tmp_path: Path, conversational: bool) -> None:
    prompts: list[Any] = ["3 + 5?", "1 + 1?"]
    if conversational:
        prompts = [[{"role": "user", "content": prompt}] for prompt in prompts]
    data = [{"prompt": prompts[0], "answer": "8", "tags": ["a"]}, {"prompt": prompts[1], "answer": "2", "tags": []}]
    given = given_by_trl(tmp_path, data)
    ours = arguments(as_rows(given, conversational), TrainerState(global_step=0))
    ours["trainer_state"] = ours["trainer_state"].global_step
    given["prompt_id"] = ["any"] * 4  # ours alone
    assert {key: value for key, value in given.items() if key not in ("log_extra", "log_metric")} == ours
    assert given.keys() - ours.keys() == {"log_extra", "log_metric"}


def test_trls_own_rewards(tmp_path: Path) -> None:
    texts = ["<think>\nIt is\n</think>\n8", "8"]
    given = {
        "completions": [[{"role": "assistant", "content": text}] for text in texts],
        "completion_ids": [[1, 2], [3]],
        "prompts": [[{"role": "user", "content": "3 + 5?"}]] * 2,
        "answer": ["8", "8"],
        "tags": [["a"], []],
    }
    (tmp_path / "reward.py").write_text(
        "from trl.rewards import get_repetition_penalty_reward, get_soft_overlong_punishment\n"
        "overlong = get_soft_overlong_punishment(max_completion_len=2, soft_punish_cache=1)\n"
    )
    configs = [
        FunctionReward(name="format", function="trl.rewards:think_format_reward"),
        FunctionReward(name="length", function="reward.py:overlong"),
    ]
    scores = score_functions(configs, as_rows(given, conversational=True), tmp_path, TrainerState(global_step=0))
    np.testing.assert_array_equal(scores["format"], [1.0, 0.0])
    np.testing.assert_array_equal(scores["length"], [-1.0, 0.0])
