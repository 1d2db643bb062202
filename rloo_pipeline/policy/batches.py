"""Batches by token budget: rows of like length together, padded on the right."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

if TYPE_CHECKING:
    import torch

Ids = Sequence[int] | np.ndarray


@dataclass(frozen=True)
class Batch:
    """B rows of prompt + completion, L tokens wide; T is the longest completion."""

    rows_B: np.ndarray
    input_ids_BL: "torch.Tensor"
    attention_mask_BL: "torch.Tensor"
    completion_ids_BT: "torch.Tensor"
    completion_mask_BT: "torch.Tensor"
    before_BT: "torch.Tensor"  # position whose output predicts each completion token

    def to(self, device: "torch.device") -> "Batch":
        """The batch with its tensors on `device`."""
        moved = {key: value.to(device) for key, value in vars(self).items() if key != "rows_B"}
        return Batch(rows_B=self.rows_B, **moved)


def plan(lengths_N: np.ndarray, batch_tokens: int) -> list[np.ndarray]:
    """Split rows, longest first, into batches of at most `batch_tokens` padded tokens (or a single row)."""
    order = np.argsort(-lengths_N, kind="stable")
    batches, start = [], 0
    while start < len(order):
        rows = max(1, batch_tokens // int(lengths_N[order[start]]))
        batches.append(order[start : start + rows])
        start += rows
    return batches


def ragged(values: Sequence[Ids], starts_B: np.ndarray, width: int, fill: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows laid into a [B, width] array, int64, from their start on, and the mask of where they lie."""
    lengths_B = np.fromiter((len(value) for value in values), np.int64, len(values))
    columns = np.arange(width)
    mask = (columns >= starts_B[:, None]) & (columns < (starts_B + lengths_B)[:, None])
    array = np.full((len(values), width), fill, np.int64)
    array[mask] = np.concatenate([np.asarray(value, np.int64) for value in values]) if len(values) else []
    return array, mask


def collate(prompts: Sequence[Ids], completions: Sequence[Ids], rows_B: np.ndarray) -> Batch:
    """The batch of the given rows. The pad id is 0; masks alone tell what counts, so pad may equal EOS."""
    import torch

    prompts_B = [prompts[row] for row in rows_B]
    completions_B = [completions[row] for row in rows_B]
    prompt_lengths = np.array([len(item) for item in prompts_B])
    completion_lengths = np.array([len(item) for item in completions_B])
    zeros = np.zeros(len(rows_B), np.int64)
    both = [np.concatenate([p, c]) for p, c in zip(prompts_B, completions_B, strict=True)]
    input_ids, attention_mask = ragged(both, zeros, int((prompt_lengths + completion_lengths).max()), 0)
    completion_ids, completion_mask = ragged(completions_B, zeros, int(completion_lengths.max()), 0)
    before = prompt_lengths[:, None] - 1 + np.arange(completion_ids.shape[1])
    return Batch(
        rows_B=rows_B,
        input_ids_BL=torch.from_numpy(input_ids),
        attention_mask_BL=torch.from_numpy(attention_mask.astype(np.int64)),
        completion_ids_BT=torch.from_numpy(completion_ids),
        completion_mask_BT=torch.from_numpy(completion_mask),
        before_BT=torch.from_numpy(np.minimum(before, input_ids.shape[1] - 1)),
    )


def rows_of(table: pa.Table, name: str) -> list[np.ndarray]:
    """The rows of a list column as views into one flat array."""
    column = table[name].combine_chunks()
    flat, lengths = column.flatten().to_numpy(), column.value_lengths().to_numpy()
    # Splitting at every row's end leaves nothing behind the last one, and no row of an empty table.
    return np.split(flat, np.cumsum(lengths))[:-1]
