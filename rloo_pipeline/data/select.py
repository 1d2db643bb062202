"""Which prompts an iteration uses: a pure function of the seed and the iteration's number."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rloo_pipeline import seeds
from rloo_pipeline.data.mixture import draws, most, whole_weights
from rloo_pipeline.errors import UserError
from rloo_pipeline.schema import MIXTURE, MIXTURE_WEIGHT

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Selection:
    """The prompts of an iteration, as `rows_P` of their table, and the passes over the prompts made by its end.

    epochs: `epoch` of all prompts; in a mixture `epoch/<place>` of each dataset too, which has epochs of its own.
    """

    rows_P: Indices
    epochs: dict[str, float]


def select_prompts(train: pa.Table, per_iteration: int, iteration: int, seed: int, asked: str = "") -> Selection:
    """Distinct prompts of iteration 1, 2, ... from a table as `prepare` writes it, datasets by their weights if any.

    asked: how per_iteration comes about, as messages tell it. Raises UserError if there are too few prompts.
    """
    n = train.num_rows
    epochs = {"epoch": per_iteration * iteration / n}
    if MIXTURE not in train.column_names:
        return Selection(select(n, per_iteration, iteration, seed, asked), epochs)
    dataset_N = train[MIXTURE].to_numpy()
    places, first_D = np.unique(dataset_N, return_index=True)
    members = [np.flatnonzero(dataset_N == place) for place in places]
    weights = train[MIXTURE_WEIGHT].to_numpy()[first_D].tolist()
    sizes = [len(rows) for rows in members]
    dataset_P, index_P, drawn_D = mix(sizes, weights, per_iteration, iteration, seed, asked)
    rows_P = np.empty(per_iteration, np.int64)
    for dataset, rows in enumerate(members):
        rows_P[dataset_P == dataset] = rows[index_P[dataset_P == dataset]]
        epochs[f"epoch/{places[dataset]}"] = drawn_D[dataset] / sizes[dataset]
    return Selection(rows_P, epochs)


def select(n_prompts: int, per_iteration: int, iteration: int, seed: int, asked: str = "") -> Indices:
    """Indices `prompts_P` (distinct, int64, below n_prompts) of iteration 1, 2, ...

    Iterations take consecutive pieces of a row of epochs, each a permutation of all prompts. Raises UserError if an
    iteration would need a prompt twice.
    """
    if per_iteration > n_prompts:
        raise UserError(
            f"rollouts.prompts_per_iteration is {asked or per_iteration}, but there are {n_prompts} prompts; lower it, "
            "or give more prompts"
        )
    if iteration < 1:
        raise ValueError(f"iteration {iteration}: counted from 1")
    return _piece(n_prompts, np.arange(iteration + 1) * per_iteration, seed, "prompts")


def mix(
    sizes: Sequence[int], weights: Sequence[float], per_iteration: int, iteration: int, seed: int, asked: str = ""
) -> tuple[Indices, Indices, list[int]]:
    """`datasets_P` and `indices_P` within them of iteration 1, 2, ..., and how many draws each had by its end.

    After any number of draws a dataset has had its weight's share of them, give or take less than one. Each goes
    through epochs of its own as `select` does. Raises UserError if an iteration could need a prompt twice.
    """
    whole = whole_weights(weights)
    for dataset, size in enumerate(sizes):
        need = most(whole[dataset], sum(whole), len(whole), per_iteration)
        if need > size:
            raise UserError(
                f"prompts.train.{dataset} has {size} prompts, but by its weight {weights[dataset]:g} an iteration of "
                f"rollouts.prompts_per_iteration {asked or per_iteration} can take {need}; lower one of the two, or "
                "give it more prompts"
            )
    dataset_T = draws(whole, per_iteration * iteration)
    ends_I = np.arange(iteration + 1) * per_iteration
    dataset_P, index_P = dataset_T[-per_iteration:], np.empty(per_iteration, np.int64)
    drawn_D = []
    for dataset, size in enumerate(sizes):
        bounds_I = np.concatenate([[0], np.cumsum(dataset_T == dataset)])[ends_I]
        index_P[dataset_P == dataset] = _piece(size, bounds_I, seed, "prompts", "mixture", dataset)
        drawn_D.append(int(bounds_I[-1]))
    return dataset_P, index_P, drawn_D


def _piece(n: int, bounds_I: Indices, seed: int, *purpose: str | int) -> Indices:
    """What the last iteration takes of a row of epochs; bounds_I: where each iteration begins, and the last one's end.

    No index is there twice, though the iteration may reach from one epoch into the next.
    """
    start, end = int(bounds_I[-2]), int(bounds_I[-1])
    last_epoch = max(end - 1, start) // n
    epochs: list[Indices] = []
    first_epoch = _first_needed(n, bounds_I, start // n)
    for epoch in range(first_epoch, last_epoch + 1):
        order = _permutation(n, seed, *purpose, epoch)
        crossing = np.searchsorted(bounds_I, epoch * n, side="right") - 1
        taken = epoch * n - int(bounds_I[crossing])
        if taken and epochs:
            order = _put_behind(order, epochs[-1][-taken:], int(bounds_I[crossing + 1]) - epoch * n)
        epochs = [*epochs[-1:], order]
    pieces = epochs if last_epoch > start // n else epochs[-1:]
    return np.concatenate(pieces)[start % n : start % n + end - start]


def _first_needed(n: int, bounds_I: Indices, epoch: int) -> int:
    """The epoch to begin with: that of an iteration's start, whose order depends on no former epoch's, or the first.

    An epoch's order depends on the former one's end, which itself depends on the epoch before only if the epochs are
    shorter than two iterations.
    """
    longest = int(np.diff(bounds_I).max())
    if n >= 2 * longest:
        return max(epoch - 1, 0)
    while epoch and bounds_I[np.searchsorted(bounds_I, epoch * n)] != epoch * n:
        epoch -= 1
    return epoch


def _permutation(n: int, seed: int, *purpose: str | int) -> Indices:
    # Raw bits, because NumPy promises them for ever; its permutation() may change between versions.
    bits = np.random.PCG64(seeds.derive(seed, *purpose)).random_raw(n)
    return np.argsort(bits, kind="stable").astype(np.int64)


def _put_behind(order: Indices, used: Indices, count: int) -> Indices:
    """The same permutation, but with no `used` entry among its first `count`: those move just behind."""
    ahead = order[~np.isin(order, used)][:count]
    return np.concatenate([ahead, order[~np.isin(order, ahead)]])
