"""Passes of a reward model over token ids."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rloo_pipeline.policy.batches import plan
from rloo_pipeline.progress import progress

if TYPE_CHECKING:
    import torch

Ids = Sequence[int]


def logits(model: Any, ids: Sequence[Ids]) -> "torch.Tensor":
    """The logit of each row, float32 [B], padded on the right with the model's pad token."""
    import torch

    width, pad = max(len(tokens) for tokens in ids), model.config.get_text_config().pad_token_id
    padded = torch.tensor([[*tokens, *[pad] * (width - len(tokens))] for tokens in ids], device=model.device)
    lengths_B1 = torch.tensor([len(tokens) for tokens in ids], device=model.device)[:, None]
    mask = torch.arange(width, device=model.device) < lengths_B1
    found: torch.Tensor = model(input_ids=padded, attention_mask=mask.long()).logits[:, 0]
    return found.float()


def score(model: Any, ids: Sequence[Ids], batch_tokens: int, what: str) -> np.ndarray:
    """`scores_N` (float64) of all rows, at most `batch_tokens` padded tokens in a pass."""
    import torch

    scores_N = np.empty(len(ids), np.float64)
    with progress(what, len(ids), "completions") as done, torch.inference_mode():
        for rows_B in plan(np.array([len(tokens) for tokens in ids]), batch_tokens):
            scores_N[rows_B] = logits(model, [ids[row] for row in rows_B]).double().cpu().numpy()
            done.advance(len(rows_B))
    return scores_N
