"""The examples for the hub, with made-up rows in folders of their datasets' names, which the hub client takes first."""

import json
from pathlib import Path
from typing import Any

import pytest

from rloo_pipeline.config import load_params
from rloo_pipeline.data.splits import load_prompts
from rloo_pipeline.init import EXAMPLES
from rloo_pipeline.rewards.sources import load_callable


def stored(folder: Path, **splits: list[dict[str, Any]]) -> None:
    """A dataset's folder with one file for each split."""
    folder.mkdir(parents=True)
    for split, rows in splits.items():
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def prompts(example: str) -> dict[str, list[dict[str, Any]]]:
    """The rows of train and eval as the example's params.yaml makes them."""
    config = load_params(EXAMPLES / example / "params.yaml").prompts
    loaded = load_prompts(config, EXAMPLES / example, seed=0)
    return {split: each.table.drop_columns(["prompt_id"]).to_pylist() for split, each in loaded.items()}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    return tmp_path


def test_gsm8k(here: Path) -> None:
    folder = here / "openai/gsm8k"
    stored(
        folder / "main",
        train=[{"question": "One and one?", "answer": "1+1 = <<1+1=2>>2\n#### 2"}],
        test=[{"question": "A thousand and one?", "answer": "#### 1,001"}],
    )
    configuration = "configs:\n- config_name: main\n  data_dir: main\n"
    (folder / "README.md").write_text(f"---\n{configuration}---\n")
    found = prompts("gsm8k")
    system = 'Let\'s think step by step and output the final answer after "####".'
    assert found["train"] == [
        {
            "prompt": [{"role": "system", "content": system}, {"role": "user", "content": "One and one?"}],
            "answer": "1+1 = <<1+1=2>>2\n#### 2",
        }
    ]
    reward = load_callable("reward.py:correct", EXAMPLES / "gsm8k")
    answers = [row["answer"] for split in found.values() for row in split]
    assert reward(completions=["#### 2", "it makes 1001."], answer=answers) == [1.0, 1.0]


def test_tldr(here: Path) -> None:
    rows = [{"prompt": "SUBREDDIT: r/a\n\nPOST: Long.\n\nTL;DR:", "completion": " Short."}]
    stored(here / "trl-lib/tldr", train=rows, validation=rows)
    assert prompts("tldr") == {"train": rows, "eval": rows}


def test_hh(here: Path) -> None:
    first = "\n\nHuman: Hello?\n\nAssistant: Hi."
    second = f"{first}\n\nHuman: Who said 'Assistant: no'?\n\nAssistant: Nobody.\n\nTwo lines. "
    stored(
        here / "Anthropic/hh-rlhf/helpful-base",
        train=[{"chosen": first, "rejected": "-"}, {"chosen": f"{first} You?", "rejected": "-"}],
        test=[{"chosen": second, "rejected": "-"}],
    )
    found = prompts("hh")
    (row,) = found["train"]  # the same prompt once
    assert row == {"prompt": "\n\nHuman: Hello?\n\nAssistant:", "completion": " Hi. You?", "turns": 1}
    (row,) = found["eval"]
    assert row["prompt"] == f"{first}\n\nHuman: Who said 'Assistant: no'?\n\nAssistant:"
    assert (row["completion"], row["turns"]) == (" Nobody.\n\nTwo lines.", 2)


def test_a_dialogue_without_a_reply_is_told() -> None:
    row = load_callable("prompts.py:row", EXAMPLES / "hh")
    with pytest.raises(ValueError, match="no turn of the assistant"):
        row("\n\nHuman: Hello?")
