"""Our reward functions' arguments against those of a running RLOOTrainer, and TRL's own rewards unchanged."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from datasets import Dataset

from rloo_pipeline.config import ExecutionConfig
from rloo_pipeline.data.prompts import MESSAGES
from rloo_pipeline.reward_config import FunctionReward
from rloo_pipeline.rewards.call import TrainerState, arguments
from rloo_pipeline.rewards.functions import open_functions
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


SOLVED = ["<think>\nIt is\n</think>\n\\boxed{8}", "$9$", "\\boxed{8}", "no number"]
IDS = [[1, 2, 3, 1, 2, 3], [3], [4, 4, 4, 4], [5, 6]]
OVERLONG = {"max_completion_len": 5, "soft_punish_cache": 3}


def test_trls_own_rewards(tmp_path: Path) -> None:
    """Run unchanged, with the values that TRL's own functions give for the same arguments."""
    rewards = pytest.importorskip("trl.rewards")
    given = {
        "completions": [[{"role": "assistant", "content": text}] for text in SOLVED],
        "completion_ids": IDS,
        "prompts": [[{"role": "user", "content": "3 + 5?"}]] * 4,
        "answer": ["8"] * 4,
        "tags": [["a"], [], ["b"], []],
    }
    rows = as_rows(given, conversational=True).append_column("solution", pa.array(["$8$", "$8$", "$8$", "?"]))
    (tmp_path / "reward.py").write_text(
        "from trl.rewards import get_repetition_penalty_reward\nrepeats = get_repetition_penalty_reward(2, -0.5)\n"
    )
    expected = {
        "accuracy": rewards.accuracy_reward(given["completions"], ["$8$", "$8$", "$8$", "?"]),
        "format": rewards.think_format_reward(given["completions"]),
        "repeats": rewards.get_repetition_penalty_reward(2, -0.5)(completion_ids=IDS),
        "overlong": rewards.get_soft_overlong_punishment(**OVERLONG)(completion_ids=IDS),
    }
    configs = [
        FunctionReward(name="accuracy", function="trl.rewards:accuracy_reward"),
        FunctionReward(name="format", function="trl.rewards:think_format_reward"),
        FunctionReward(name="repeats", function="reward.py:repeats"),
        FunctionReward(name="overlong", function="trl.rewards:get_soft_overlong_punishment", kwargs=OVERLONG),
    ]
    with open_functions(configs, tmp_path, TrainerState(0), ExecutionConfig()) as score:
        scored = score(rows)
    for name, values in expected.items():
        np.testing.assert_array_equal(scored[name].scores_N, np.array(values, np.float64), name)
        assert scored[name].errors == {}
    assert expected["accuracy"] == [1.0, 0.0, 1.0, None]
    assert expected["format"] == [1.0, 0.0, 0.0, 0.0]
    assert expected["overlong"][0] == -1.0
    assert scored["accuracy"].extra[3] == {
        "solution": "?",
        "gold_parsed": "[unparseable]",
        "answer_parsed": "[skipped]",
    }
