"""What is taken off the reward of a completion that is too long. All in reward units, 0 or more."""

import numpy as np


def missing_eos_penalty(truncated_N: np.ndarray, penalty: float) -> np.ndarray:
    """`penalty` for each completion that was cut before its EOS, float64 [N] (Ahmadian et al. 2024, TL;DR set-up)."""
    return penalty * np.asarray(truncated_N, np.float64)


def soft_overlong_penalty(lengths_N: np.ndarray, max_tokens: int, ramp_tokens: int, penalty: float = 1.0) -> np.ndarray:
    """0 up to max_tokens - ramp_tokens, then rising linearly to `penalty` at max_tokens, float64 [N].

    Source: Yu et al. 2025, arXiv:2503.14476, DAPO, soft overlong punishment (there with penalty 1). Raises ValueError
    unless 1 <= ramp_tokens <= max_tokens.
    """
    if not 1 <= ramp_tokens <= max_tokens:
        raise ValueError(f"ramp_tokens {ramp_tokens} is not between 1 and max_tokens {max_tokens}")
    over_N = np.asarray(lengths_N, np.float64) - (max_tokens - ramp_tokens)
    return penalty * np.clip(over_N / ramp_tokens, 0.0, 1.0)
