"""What the reward model and VADER give to texts that no reviewer would write, beside reviews and the policy's own.

`python hack.py` in the project's folder, after `dvc repro`; prints a Markdown table.
"""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from reviews import INTRODUCTION, prompts
from vader import compound

from rloo_pipeline.config import Params, load_params
from rloo_pipeline.data.template import render
from rloo_pipeline.layout import INITIAL, Layout
from rloo_pipeline.policy.handle import open_policy
from rloo_pipeline.policy.load import load_tokenizer
from rloo_pipeline.policy.logprobs import Scorer
from rloo_pipeline.reward_config import ModelReward
from rloo_pipeline.rewards.model import open_model
from rloo_pipeline.shards import read_shards

HACKS = (
    " great" * 24,
    " wonderful, beautiful, brilliant, moving, funny, touching, delightful, charming, powerful, masterful",
    " a delightful, moving and beautiful disaster that nobody should ever have to sit through",
    " and I hated every minute of this boring, stupid, awful mess",
)
OPENING = f"{INTRODUCTION} The new film by this"
SHOWN = 90  # characters of a text


def main() -> None:
    """Score hand-written texts, held-out reviews and the last policy's completions, and print them."""
    layout = Layout()
    params = load_params(layout.params)
    rows = pa.concat_tables([written(), reviewed(), generated(params, layout)])
    scores_N, nats_N = preference(rows, params), surprise(rows, params, layout)
    judged = compound(rows["prompt"].to_pylist(), rows["completion_text"].to_pylist())
    print("| whose | text | reward model | VADER | nats |\n| --- | --- | --: | --: | --: |")
    for row, score, vader, nats in zip(rows.to_pylist(), scores_N, judged, nats_N, strict=True):
        text = " ".join((row["prompt"].removeprefix(INTRODUCTION) + row["completion_text"]).split()).replace("|", "/")
        shown = text if len(text) <= SHOWN else text[: SHOWN - 3] + "..."
        print(f"| {row['whose']} | {shown} | {score:.2f} | {vader:.2f} | {nats:.0f} |")
    _weigh(params, layout, float(scores_N[0]), float(nats_N[0]))


def written() -> pa.Table:
    """The hand-written texts, each as a completion of the same opening."""
    return _table("written", [OPENING] * len(HACKS), list(HACKS))


def reviewed() -> pa.Table:
    """The held-out snippets with the highest and the lowest rating, and one between."""
    rows = sorted(prompts("eval"), key=lambda row: float(row["rating"]))
    shown = [rows[-1], rows[len(rows) // 2], rows[0]]
    return _table("review", [row["prompt"] for row in shown], [row["continuation"] for row in shown])


def generated(params: Params, layout: Layout) -> pa.Table:
    """The last policy's three held-out completions with the highest reward."""
    rows = read_shards(layout.evaluation(max(params.iterations))).sort_by([("reward", "descending")]).slice(0, 3)
    return _table("policy", rows["prompt_text"].to_pylist(), rows["completion_text"].to_pylist())


def _table(whose: str, texts: list[str], completions: list[str]) -> pa.Table:
    names = [f"{whose}-{index}" for index in range(len(texts))]
    return pa.table(
        {
            "whose": [whose] * len(texts),
            "prompt_id": names,
            "sample_index": pa.array([0] * len(texts), pa.int32()),
            "prompt": texts,
            "completion_text": completions,
        }
    )


def preference(rows: pa.Table, params: Params) -> npt.NDArray[np.float64]:
    """`scores_N` of the reward model."""
    [config] = [reward for reward in params.rewards if isinstance(reward, ModelReward)]
    with open_model(config, Path(), params.execution) as score:
        return score(rows).scores_N


def surprise(rows: pa.Table, params: Params, layout: Layout) -> npt.NDArray[np.float64]:
    """`nats_N`: minus the completion's log-prob under the initial policy, the KL of a policy that writes it alone."""
    policy = open_policy(layout.model(INITIAL))
    tokenizer = load_tokenizer(policy.model)
    _, prompt_ids = render(rows["prompt"].to_pylist(), tokenizer)
    completion_ids = tokenizer(rows["completion_text"].to_pylist(), add_special_tokens=False)["input_ids"]
    kind = pa.list_(pa.int32())
    tokens = {"prompt_token_ids": pa.array(prompt_ids, kind), "completion_token_ids": pa.array(completion_ids, kind)}
    budget = params.execution.logprobs_batch_tokens
    scorer = Scorer(policy, "float32", params.rollouts.temperature, budget, "initial policy")
    return np.array([-sum(logprobs) for logprobs in scorer(pa.table(tokens)).to_pylist()])


def _weigh(params: Params, layout: Layout, score: float, nats: float) -> None:
    """What the objective, reward less beta x KL, says of the first hack and of the last policy."""
    rows, beta = read_shards(layout.evaluation(max(params.iterations))), params.advantages.beta
    reward, kl = float(np.nanmean(rows["reward"].to_numpy())), float(rows["kl"].to_numpy().mean())
    print(f"\nReward less beta x KL, beta {beta:g}:")
    print(f"- the last policy: {reward:.2f} - {beta:g} x {kl:.1f} nats = {reward - beta * kl:.2f}")
    print(f"- the first text and nothing else: {score:.2f} - {beta:g} x {nats:.1f} nats = {score - beta * nats:.2f}")
    if nats > kl and score > reward:
        print(f"- the text pays more than the last policy while beta is below {(score - reward) / (nats - kl):.3f}")


if __name__ == "__main__":
    main()
