"""Which prompts an iteration uses."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rloo_pipeline.data.select import select
from rloo_pipeline.errors import UserError

SIZES = st.integers(1, 30).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n)))


@given(SIZES, st.integers(0, 2**40), st.integers(1, 6))
def test_every_epoch_covers_every_prompt_once(sizes: tuple[int, int], seed: int, epochs: int) -> None:
    n, per_iteration = sizes
    iterations = -(-n * epochs // per_iteration)
    stream = np.concatenate([select(n, per_iteration, i, seed) for i in range(1, iterations + 1)])
    for epoch in range(epochs):
        assert sorted(stream[epoch * n : (epoch + 1) * n]) == list(range(n))


@given(SIZES, st.integers(0, 2**40), st.integers(1, 40))
def test_no_prompt_twice_in_an_iteration(sizes: tuple[int, int], seed: int, iteration: int) -> None:
    n, per_iteration = sizes
    chosen = select(n, per_iteration, iteration, seed)
    assert chosen.shape == (per_iteration,)
    assert len(set(chosen.tolist())) == per_iteration
    assert set(chosen.tolist()) <= set(range(n))


def test_pure_function_of_seed_and_iteration() -> None:
    once = [select(50, 8, i, seed=3).tolist() for i in (1, 2, 9)]
    assert [select(50, 8, i, seed=3).tolist() for i in (9, 2, 1)] == once[::-1]
    assert select(50, 8, 1, seed=4).tolist() != once[0]
    assert once[0] != once[1]


def test_order_of_an_epoch_differs_from_the_next() -> None:
    assert select(50, 50, 1, seed=0).tolist() != select(50, 50, 2, seed=0).tolist()


def test_first_prompt_is_uniform() -> None:
    counts = Counter(int(select(5, 2, 1, seed)[0]) for seed in range(2000))
    # Binomial(2000, .2): standard deviation 17.9; five of them.
    assert all(abs(counts[prompt] - 400) < 90 for prompt in range(5))


def test_more_than_there_are() -> None:
    with pytest.raises(UserError, match="prompts_per_iteration is 9, but there are 8 prompts; lower it"):
        select(8, 9, 1, seed=0)
    with pytest.raises(UserError, match=r"is 16 x oversample 4 = 64, but there are 50 prompts; lower it"):
        select(50, 64, 1, 0, "16 x oversample 4 = 64")
