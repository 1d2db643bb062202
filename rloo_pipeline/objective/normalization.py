"""What an optimizer step's loss is divided by."""

from typing import Literal

import numpy as np

LossNormalization = Literal["sequence", "token", "constant"]


def loss_denominator(
    normalization: LossNormalization, lengths_N: np.ndarray, trained_N: np.ndarray, constant_length: int | None = None
) -> float:
    """Denominator of one optimizer step over its own rows: trained sequences, their tokens, or sequences * a length.

    sequence: the policy gradient (Ahmadian et al. 2024); token: DAPO (Yu et al. 2025, arXiv:2503.14476), every token
    weighs the same and the step grows as completions shorten; constant: Dr. GRPO (Liu et al. 2025, arXiv:2503.20783),
    the sequence one in other units. lengths_N: tokens of each completion, masked rows included. Nothing trained: 0.
    Raises ValueError on constant without constant_length.
    """
    if normalization == "token":
        return float(lengths_N[trained_N].sum())
    if normalization == "sequence":
        return float(trained_N.sum())
    if constant_length is None:
        raise ValueError("loss normalization constant needs constant_length, in tokens")
    return float(trained_N.sum()) * constant_length
