"""Preferences: the Bradley-Terry loss, and how well predicted preferences are calibrated."""

from dataclasses import dataclass

import numpy as np
import torch


def bradley_terry_loss(
    chosen_B: torch.Tensor, rejected_B: torch.Tensor, margin_B: torch.Tensor, denominator: int
) -> torch.Tensor:
    """A microbatch's share of -(1 / denominator) * sum_i log sigmoid(r_chosen - r_rejected - margin), float32 scalar.

    Bradley & Terry 1952; Ouyang et al. 2022 (arXiv:2203.02155), eq. 1; with a margin Touvron et al. 2023
    (arXiv:2307.09288), eq. 2. denominator: the pairs of the whole optimizer step, whatever the microbatches.
    """
    difference_B = chosen_B.float() - rejected_B.float() - margin_B.float()
    return -torch.nn.functional.logsigmoid(difference_B).sum() / denominator


def won(difference_N: np.ndarray) -> np.ndarray:
    """1 where chosen scores higher than rejected, 0 where lower, 0.5 where both score the same, float64 [N]."""
    return 0.5 + 0.5 * np.sign(np.asarray(difference_N, np.float64))


def brier(difference_N: np.ndarray) -> float:
    """Brier score of P(chosen preferred) = sigmoid(difference): mean of (1 - P)^2 (Brier 1950); 0.25 for chance."""
    return float(np.mean((1 - _sigmoid(difference_N)) ** 2))


def pair_loss(difference_N: np.ndarray) -> np.ndarray:
    """-log sigmoid(difference) in float64 [N], nats."""
    loss_N: np.ndarray = np.logaddexp(0, -np.asarray(difference_N, np.float64))
    return loss_N


def _sigmoid(difference_N: np.ndarray) -> np.ndarray:
    sigmoid_N: np.ndarray = np.exp(-pair_loss(difference_N))
    return sigmoid_N


@dataclass(frozen=True)
class Bin:
    """Pairs whose predicted probability lies in one bin."""

    low: float
    high: float
    pairs: int
    confidence: float  # mean predicted probability of the side that is predicted to win; NaN without pairs
    accuracy: float  # share of them in which it did; NaN without pairs


def reliability(difference_N: np.ndarray, bins: int = 10) -> list[Bin]:
    """Pairs by the probability that they give to the side with the higher score, in equal bins of [0.5, 1].

    That the chosen side comes first says nothing, so the prediction is of the winner and not of `chosen`: binning
    P(chosen preferred) itself against an outcome that is always 1 would call every doubt an error.
    """
    confidence_N = _sigmoid(np.abs(np.asarray(difference_N, np.float64)))
    edges = np.linspace(0.5, 1.0, bins + 1)
    index_N = np.clip(np.searchsorted(edges, confidence_N, side="right") - 1, 0, bins - 1)
    won_N, found = won(difference_N), []
    for index in range(bins):
        inside_N = index_N == index
        pairs = int(inside_N.sum())
        mean = (float(confidence_N[inside_N].mean()), float(won_N[inside_N].mean())) if pairs else (np.nan, np.nan)
        found.append(Bin(float(edges[index]), float(edges[index + 1]), pairs, *mean))
    return found


def calibration_error(table: list[Bin]) -> float:
    """Expected calibration error: |accuracy - confidence| of the bins, weighted by pairs (Guo et al. 2017, eq. 3)."""
    filled = [item for item in table if item.pairs]
    total = sum(item.pairs for item in filled)
    return sum(item.pairs * abs(item.accuracy - item.confidence) for item in filled) / total
