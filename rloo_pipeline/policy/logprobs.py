"""Per-token log-probs of completions: the one place where stages score tokens."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from rloo_pipeline.data.images import Encoded
from rloo_pipeline.errors import UserError
from rloo_pipeline.policy.batches import Batch, Ids, collate, plan, rows_of
from rloo_pipeline.policy.handle import Policy
from rloo_pipeline.policy.images import RowImages, Vision, open_vision, row_images
from rloo_pipeline.policy.load import load_model
from rloo_pipeline.progress import Progress, progress

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

LOGITS_AT_ONCE = 2**26  # elements of [rows, vocabulary] held in float32: 256 MiB
NEVER = -1e30  # logit of an id that is never sampled; finite, since the gradient through -inf is NaN


@dataclass(frozen=True)
class Scores:
    """What a pass over a batch gives."""

    logprobs_BT: "torch.Tensor"  # float32 (float64 for a float64 model), nats, 0 where completion_mask is False
    entropy: "torch.Tensor"  # scalar, sum over completion tokens, nats, without gradient


def _head(model: "PreTrainedModel") -> Callable[["torch.Tensor"], "torch.Tensor"]:
    """From last hidden states to logits, with the scaling and capping that some architectures add."""
    import torch

    config: Any = model.config.get_text_config()
    scale = getattr(config, "logit_scale", None) or 1 / (getattr(config, "logits_scaling", None) or 1)
    cap = getattr(config, "final_logit_softcapping", None)
    linear = model.get_output_embeddings()

    def head(hidden_RH: "torch.Tensor") -> "torch.Tensor":
        logits_RV: torch.Tensor = linear(hidden_RH) * scale if scale != 1 else linear(hidden_RH)
        return torch.tanh(logits_RV / cap) * cap if cap else logits_RV

    return head


def check_head(model: "PreTrainedModel") -> None:
    """Raise UserError if the model's own logits are not those that its hidden states give here."""
    import torch

    ids = torch.arange(4, device=model.device)[None]
    with torch.no_grad():
        hidden = model.base_model(input_ids=ids).last_hidden_state
        close = torch.allclose(_head(model)(hidden).float(), model(input_ids=ids).logits.float(), atol=1e-2, rtol=1e-2)
    if not close:
        raise UserError(
            f"{model.config.model_type}: this architecture changes its logits after the output layer in a way that is "
            "not known here, so log-probs would be wrong; report it or use another policy.model"
        )


def score_batch(model: "PreTrainedModel", batch: Batch, temperature: float, images: RowImages | None = None) -> Scores:
    """Log-prob of each completion token under softmax(logits / temperature), with gradient where it is enabled.

    images: of all rows that the batch is taken from, for a policy loaded with images.

    The hidden states are projected on the vocabulary in chunks; with gradients each chunk is recomputed in the
    backward pass, so that never more than LOGITS_AT_ONCE logits exist in float32.
    """
    import torch
    from torch.utils.checkpoint import checkpoint

    from rloo_pipeline.objective.distribution import entropy_of, token_logprobs_of

    seen = {} if images is None else images.inputs(batch, model)
    hidden_BLH = model.base_model(
        input_ids=batch.input_ids_BL, attention_mask=batch.attention_mask_BL, use_cache=False, **seen
    ).last_hidden_state
    row, step = batch.completion_mask_BT.nonzero(as_tuple=True)
    hidden_RH = hidden_BLH[row, batch.before_BT[row, step]]
    ids_R = batch.completion_ids_BT[row, step]
    head = _head(model)
    never = torch.tensor([] if images is None else images.vision.placeholders, dtype=torch.int64, device=model.device)

    def chunk(hidden: "torch.Tensor", ids: "torch.Tensor") -> tuple["torch.Tensor", "torch.Tensor"]:
        logits = head(hidden)
        if len(never):
            logits = logits.index_fill(-1, never, NEVER)
        return token_logprobs_of(logits, ids, temperature), entropy_of(logits.detach(), temperature).sum()

    size = max(1, LOGITS_AT_ONCE // model.config.get_text_config().vocab_size)
    parts = [
        checkpoint(chunk, hidden, ids, use_reentrant=False) if torch.is_grad_enabled() else chunk(hidden, ids)
        for hidden, ids in zip(torch.split(hidden_RH, size), torch.split(ids_R, size), strict=True)
    ]
    logprobs_R = torch.cat([logprobs for logprobs, _ in parts])
    logprobs_BT = logprobs_R.new_zeros(batch.completion_mask_BT.shape).index_put((row, step), logprobs_R)
    return Scores(logprobs_BT, torch.stack([entropy for _, entropy in parts]).sum())


def batches(prompts: Sequence[Ids], completions: Sequence[Ids], batch_tokens: int) -> Iterator[Batch]:
    """The rows in batches of at most `batch_tokens` padded tokens, longest first."""
    lengths_N = np.array([len(p) + len(c) for p, c in zip(prompts, completions, strict=True)])
    for rows_B in plan(lengths_N, batch_tokens):
        yield collate(prompts, completions, rows_B)


def score(
    model: "PreTrainedModel",
    prompts: Sequence[Ids],
    completions: Sequence[Ids],
    temperature: float,
    batch_tokens: int,
    done: Progress,
    images: RowImages | None = None,
) -> list[np.ndarray]:
    """Log-probs, float32, nats, of every completion's tokens: one array for each row, as long as its completion."""
    import torch

    result: list[np.ndarray] = [np.empty(0, np.float32)] * len(completions)
    with torch.inference_mode():
        for batch in batches(prompts, completions, batch_tokens):
            moved = batch.to(model.device)
            logprobs_BT = score_batch(model, moved, temperature, images).logprobs_BT.float().cpu().numpy()
            for row, logprobs_T in zip(batch.rows_B, logprobs_BT, strict=True):
                result[row] = logprobs_T[: len(completions[row])]
            done.advance(len(batch.rows_B))
    return result


class Scorer:
    """One policy's pass over tables of completions; the model is loaded when the first table comes.

    images: those of each prompt, by its id, if the policy is given any. Raises UserError, when it loads, for an
    architecture whose logits are not known here.
    """

    def __init__(
        self,
        policy: Policy,
        dtype: str,
        temperature: float,
        batch_tokens: int,
        role: str,
        images: Mapping[str, Encoded] | None = None,
    ) -> None:
        self.policy, self.dtype, self.temperature = policy, dtype, temperature
        self.batch_tokens, self.role, self.images = batch_tokens, role, images
        self.seconds = 0.0  # in passes alone, without the model's loading
        self._last: tuple[pa.Table, pa.Array] | None = None

    @cached_property
    def model(self) -> "PreTrainedModel":
        """The loaded model."""
        with_images = self.images is not None
        trusted = self.policy.trust_remote_code
        model = load_model(self.policy.model, self.dtype, trust_remote_code=trusted, images=with_images)
        self.policy.check_unchanged()
        check_head(model)
        return model

    @cached_property
    def vision(self) -> Vision:
        """The policy's processor."""
        return open_vision(self.policy)

    def __call__(self, table: pa.Table) -> pa.Array:
        """Log-probs of the table's completions, list<float32>; the last table's are kept for a second asker."""
        if self._last is None or self._last[0] is not table:
            self._last = table, self._score(table)
        return self._last[1]

    def _score(self, table: pa.Table) -> pa.Array:
        prompts, completions = rows_of(table, "prompt_token_ids"), rows_of(table, "completion_token_ids")
        images = None if self.images is None else row_images(self.vision, self.images, table)
        model, started = self.model, time.monotonic()
        with progress(f"scoring, {self.role}", len(completions), "completions") as done:
            logprobs = score(model, prompts, completions, self.temperature, self.batch_tokens, done, images)
        self.seconds += time.monotonic() - started
        self.policy.check_unchanged()
        offsets = np.cumsum([0, *(len(row) for row in logprobs)], dtype=np.int32)
        return pa.ListArray.from_arrays(pa.array(offsets), pa.array(np.concatenate(logprobs)))
