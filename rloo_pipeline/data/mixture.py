"""Which dataset each draw of a weighted mixture is from: shares that never stray from the weights by a whole prompt."""

import heapq
import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]


def whole_weights(weights: Sequence[float]) -> list[int]:
    """The least whole numbers in the ratio of the weights, which are taken as the decimals that they print as."""
    exact = [Fraction(repr(weight)) for weight in weights]
    scale = math.lcm(*(weight.denominator for weight in exact))
    scaled = [int(weight * scale) for weight in exact]
    return [weight // math.gcd(*scaled) for weight in scaled]


def draws(weights: Sequence[int], n: int) -> Indices:
    """`datasets_n`: the dataset of each of the first n draws, after any number t of which |count - t w| <= 1 - 1/M.

    w is a dataset's share of the whole weights, M = 2 D - 2 for D datasets (Tijdeman 1980, The chairman assignment
    problem). The draws repeat after sum(weights).
    """
    total, slack = sum(weights), 2 * len(weights) - 2
    common = math.lcm(*weights)
    # Draw c (from 0) of a dataset may come once t w >= c + 1/M, and is due once t w exceeds c + 1 - 1/M.
    waiting = [(-(-total // (slack * weight)), dataset, 0) for dataset, weight in enumerate(weights)]
    heapq.heapify(waiting)
    due: list[tuple[int, int, int]] = []  # deadline in units of sum(weights) / (M lcm(weights)), dataset, draw
    chosen = np.empty(min(n, total), np.int64)
    for place in range(len(chosen)):
        while waiting and waiting[0][0] <= place + 1:
            _, dataset, count = heapq.heappop(waiting)
            heapq.heappush(due, ((slack * (count + 1) - 1) * (common // weights[dataset]), dataset, count))
        _, dataset, count = heapq.heappop(due)
        chosen[place] = dataset
        ready = -(-(slack * (count + 1) + 1) * total // (slack * weights[dataset]))
        heapq.heappush(waiting, (ready, dataset, count + 1))
    return np.resize(chosen, n)


def most(weight: int, total: int, datasets: int, per_iteration: int) -> int:
    """How many of `per_iteration` consecutive draws, from a multiple of it on, are of the dataset at most."""
    share = Fraction(weight * per_iteration, total)
    return share.numerator if share.denominator == 1 else math.floor(share + 2 - Fraction(2, 2 * datasets - 2))
