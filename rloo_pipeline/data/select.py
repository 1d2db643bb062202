"""Which prompts an iteration uses: a pure function of the seed and the iteration's number."""

import numpy as np
import numpy.typing as npt

from rloo_pipeline import seeds
from rloo_pipeline.errors import UserError

Indices = npt.NDArray[np.int64]


def select(n_prompts: int, per_iteration: int, iteration: int, seed: int, asked: str = "") -> Indices:
    """Indices `prompts_P` (distinct, int64, below n_prompts) of iteration 1, 2, ...

    Iterations take consecutive pieces of a row of epochs, each a permutation of all prompts. Raises UserError if an
    iteration would need a prompt twice; asked: how per_iteration comes about, as the message tells it.
    """
    if per_iteration > n_prompts:
        raise UserError(
            f"rollouts.prompts_per_iteration is {asked or per_iteration}, but there are {n_prompts} prompts; lower it, "
            "or give more prompts"
        )
    if iteration < 1:
        raise ValueError(f"iteration {iteration}: counted from 1")
    start, end = (iteration - 1) * per_iteration, iteration * per_iteration
    first_epoch, last_epoch = start // n_prompts, (end - 1) // n_prompts
    epochs: list[Indices] = []
    for epoch in range(last_epoch + 1):
        order = _permutation(n_prompts, seed, epoch)
        # How much of the previous epoch the iteration across the boundary has taken before it comes to this one.
        taken = epoch * n_prompts % per_iteration
        if taken:
            order = _put_behind(order, epochs[-1][-taken:], per_iteration - taken)
        epochs = [*epochs[-1:], order]
    pieces = epochs if last_epoch > first_epoch else epochs[-1:]
    offset = start - first_epoch * n_prompts
    return np.concatenate(pieces)[offset : offset + per_iteration]


def _permutation(n: int, seed: int, epoch: int) -> Indices:
    # Raw bits, because NumPy promises them for ever; its permutation() may change between versions.
    bits = np.random.PCG64(seeds.derive(seed, "prompts", epoch)).random_raw(n)
    return np.argsort(bits, kind="stable").astype(np.int64)


def _put_behind(order: Indices, used: Indices, count: int) -> Indices:
    """The same permutation, but with no `used` entry among its first `count`: those move just behind."""
    ahead = order[~np.isin(order, used)][:count]
    return np.concatenate([ahead, order[~np.isin(order, ahead)]])
