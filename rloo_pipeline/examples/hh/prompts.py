"""Dialogues of Anthropic's HH-RLHF as prompts: everything up to the assistant's last turn, in the dataset's format."""

from typing import Any

ASSISTANT = "\n\nAssistant:"


def helpful(split: str, revision: str) -> list[dict[str, Any]]:
    """The rows of helpful-base, from the hub; the same prompt once."""
    from datasets import load_dataset

    dialogues = load_dataset("Anthropic/hh-rlhf", data_dir="helpful-base", split=split, revision=revision)["chosen"]
    rows = [row(dialogue) for dialogue in dialogues]
    return list({each["prompt"]: each for each in rows}.values())


def row(dialogue: str) -> dict[str, Any]:
    """The prompt, which ends with `Assistant:`; the reply that people preferred, and the number of human turns.

    The reply keeps the space before it, since prompt and reply are joined as they are for the reward model.
    """
    before, mark, reply = dialogue.rpartition(ASSISTANT)
    if not mark:
        raise ValueError(f"no turn of the assistant in {dialogue[:80]!r}")
    return {"prompt": before + mark, "completion": reply.rstrip(), "turns": before.count("\n\nHuman:")}
