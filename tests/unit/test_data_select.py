"""Which prompts an iteration uses."""

from collections import Counter

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rloo_pipeline.data.mixture import most
from rloo_pipeline.data.select import mix, select, select_prompts
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


def test_the_order_of_former_releases() -> None:
    assert select(10, 3, 4, seed=3).tolist() == [5, 8, 6]
    assert select(7, 5, 9, seed=3).tolist() == [5, 2, 3, 4, 1]
    assert select(6, 4, 1000, seed=3).tolist() == [3, 2, 5, 4]


@given(SIZES, st.integers(0, 2**40), st.integers(1, 40))
def test_a_late_iteration_is_as_if_all_had_been_selected(sizes: tuple[int, int], seed: int, iteration: int) -> None:
    assert select(*sizes, iteration, seed).tolist() == one_after_another(*sizes, iteration, seed)


def one_after_another(n: int, per_iteration: int, iteration: int, seed: int) -> list[int]:
    """The last of `iteration` iterations: each epoch in its own order, but first what the iteration does not have."""
    last: list[int] = []
    waiting: list[int] = []
    epoch = 0
    for _ in range(iteration):
        last = waiting[:per_iteration]
        waiting = waiting[per_iteration:]
        if len(last) < per_iteration:
            epoch += 1
            order = select(n, n, epoch, seed).tolist()
            fresh = [prompt for prompt in order if prompt not in last][: per_iteration - len(last)]
            waiting = [prompt for prompt in order if prompt not in fresh]
            last = [*last, *fresh]
    return last


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


@st.composite
def mixtures(draw: st.DrawFn) -> tuple[list[int], list[int], int]:
    """Sizes and weights of datasets and how many prompts an iteration takes, such that there are enough."""
    weights = draw(st.lists(st.integers(1, 12), min_size=2, max_size=4))
    per_iteration = draw(st.integers(1, 12))
    whole = [weight // np.gcd.reduce(weights) for weight in weights]
    needs = [max(most(int(weight), int(sum(whole)), len(whole), per_iteration), 1) for weight in whole]
    return [need + draw(st.integers(0, 12)) for need in needs], weights, per_iteration


@given(mixtures(), st.integers(0, 2**40))
def test_mixture(mixture: tuple[list[int], list[int], int], seed: int) -> None:
    sizes, weights, per_iteration = mixture
    iterations = 12
    streams: list[list[int]] = [[] for _ in sizes]
    for iteration in range(1, iterations + 1):
        datasets_P, indices_P, drawn_D = mix(sizes, weights, per_iteration, iteration, seed)
        picked = list(zip(datasets_P.tolist(), indices_P.tolist(), strict=True))
        assert len(set(picked)) == per_iteration == len(picked)
        for dataset, index in picked:
            streams[dataset].append(index)
        assert drawn_D == [len(stream) for stream in streams]
        for drawn, weight in zip(drawn_D, weights, strict=True):
            assert abs(drawn * sum(weights) - per_iteration * iteration * weight) < sum(weights)
    for stream, size in zip(streams, sizes, strict=True):
        for epoch in range(len(stream) // size):
            assert sorted(stream[epoch * size : (epoch + 1) * size]) == list(range(size))
        rest = stream[len(stream) // size * size :]
        assert len(set(rest)) == len(rest)


@given(mixtures(), st.integers(0, 2**40))
def test_a_dataset_of_a_mixture_keeps_its_order_for_other_prompts_per_iteration(
    mixture: tuple[list[int], list[int], int], seed: int
) -> None:
    """Within the first epoch; where an iteration reaches into the next one, repeats are put behind."""
    sizes, weights, per_iteration = mixture
    firsts = []
    for each in (per_iteration, 1):
        streams: list[list[int]] = [[] for _ in sizes]
        for iteration in range(1, 4 * per_iteration // each + 1):
            datasets_P, indices_P, _ = mix(sizes, weights, each, iteration, seed)
            for dataset, index in zip(datasets_P.tolist(), indices_P.tolist(), strict=True):
                streams[dataset].append(index)
        firsts.append([stream[:size] for stream, size in zip(streams, sizes, strict=True)])
    assert firsts[0] == firsts[1]


def table(sizes: list[int], weights: list[float]) -> pa.Table:
    """As prepare writes it, with the rows of the datasets in turn."""
    datasets = sorted((row, dataset) for dataset, size in enumerate(sizes) for row in range(size))
    mixture = [dataset for _, dataset in datasets]
    names = [f"{dataset}:{row}" for row, dataset in datasets]
    columns = {"prompt_id": names, "mixture": pa.array(mixture, pa.int32())}
    return pa.table({**columns, "mixture_weight": [weights[dataset] for dataset in mixture]})


def test_mixture_of_a_table() -> None:
    prompts = table([30, 5], [3.0, 1.0])
    drawn: list[str] = []
    for iteration in (1, 2, 3):
        chosen = select_prompts(prompts, 8, iteration, seed=5)
        drawn += prompts["prompt_id"].take(pa.array(chosen.rows_P)).to_pylist()
        assert Counter(name[0] for name in drawn) == {"0": 6 * iteration, "1": 2 * iteration}
        assert chosen.epochs == {
            "epoch": 8 * iteration / 35, "epoch/0": 6 * iteration / 30, "epoch/1": 2 * iteration / 5
        }  # fmt: skip
    of_second = [name for name in drawn if name[0] == "1"]
    assert sorted(of_second[:5]) == [f"1:{row}" for row in range(5)]
    again = select_prompts(prompts, 8, 3, seed=5)
    assert again.rows_P.tolist() == chosen.rows_P.tolist()
    assert select_prompts(prompts, 8, 3, seed=6).rows_P.tolist() != chosen.rows_P.tolist()


def test_datasets_of_a_mixture_are_shuffled_differently() -> None:
    datasets_P, indices_P, _ = mix([20, 20], [1, 1], 40, 1, seed=5)
    assert indices_P[datasets_P == 0].tolist() != indices_P[datasets_P == 1].tolist()


def test_table_without_weights() -> None:
    prompts = pa.table({"prompt_id": [str(index) for index in range(9)]})
    chosen = select_prompts(prompts, 4, 3, seed=5)
    assert chosen.rows_P.tolist() == select(9, 4, 3, seed=5).tolist()
    assert chosen.epochs == {"epoch": 12 / 9}


def test_a_dataset_too_small_for_its_weight() -> None:
    with pytest.raises(UserError, match=r"prompts.train.1 has 2 prompts, .* weight 0.3 .*per_iteration 10 can take 3"):
        mix([50, 2], [0.7, 0.3], 10, 1, 0)
    mix([50, 3], [0.7, 0.3], 10, 1, 0)
