"""Advantages, KL and loss against values worked out by hand."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rloo_pipeline.errors import UserError
from rloo_pipeline.objective import advantages
from rloo_pipeline.objective.baselines import leave_one_out
from rloo_pipeline.objective.groups import index_groups
from rloo_pipeline.objective.kl import sequence_kl, token_kl
from rloo_pipeline.objective.loss import sequence_loss


def compute(rewards, groups, valid=None, kl=None, beta=0.0, k=2, **settings):
    groups_N = np.array(groups)
    valid_N = np.full(len(groups), True) if valid is None else np.array(valid)
    names = [f"prompt-{index}" for index in range(groups_N.max() + 1)]
    return advantages.compute(
        np.array(rewards, float), kl, groups_N, valid_N, names_G=names, completions_per_prompt=k, beta=beta, **settings
    )


def test_group_order():
    groups_N, names = index_groups(["A", "B", "A", "B"])
    assert names == ["A", "B"]
    result = compute([1, 5, 0, 4], groups_N)
    np.testing.assert_array_equal(result.advantage_N, [1, 1, -1, -1])


@given(st.permutations(range(12)), st.lists(st.floats(-5, 5), min_size=12, max_size=12))
def test_row_order_changes_nothing_to_the_last_bit(order, rewards):
    groups = np.repeat(np.arange(3), 4)
    valid = np.arange(12) % 5 != 2
    kl = np.linspace(-1, 2, 12)
    plain = compute(rewards, groups, valid, kl, 0.3, k=4)
    order = np.array(order)
    shuffled = compute(np.array(rewards)[order], groups[order], valid[order], kl[order], 0.3, k=4)
    np.testing.assert_array_equal(shuffled.advantage_N, plain.advantage_N[order])
    assert shuffled.counts == plain.counts


def test_group_size_of_one_is_refused_with_the_reason():
    with pytest.raises(UserError, match="a single completion has none; use at least 2"):
        compute([1, 2], [0, 1], k=1)


def test_group_size_is_checked_for_each_group():
    with pytest.raises(UserError, match="prompt_id prompt-0: 3 completions where completions_per_prompt is 2"):
        compute([1, 2, 3, 4], [0, 0, 0, 1])


def test_group_size_shrunk_to_one_valid_row():
    result = compute([1, np.nan, 3, 5, np.nan, np.nan], [0, 0, 1, 1, 2, 2], [True, False, True, True, False, False])
    np.testing.assert_array_equal(result.advantage_N, [0, 0, -2, 2, 0, 0])
    np.testing.assert_array_equal(result.baseline_N, [1, np.nan, 5, 3, np.nan, np.nan])
    np.testing.assert_array_equal(result.in_baseline_N, [True, False, True, True, False, False])
    np.testing.assert_array_equal(result.trained_N, [False, False, True, True, False, False])
    assert list(result.exclusion_reason_N) == [
        advantages.NO_SIBLING, advantages.INVALID, None, None, advantages.INVALID, advantages.INVALID,
    ]  # fmt: skip
    assert result.counts == advantages.Counts(
        rows=6, rows_trained=2, rows_invalid=3, rows_masked=0, rows_without_signal=0, rows_surplus=0,
        rows_without_sibling=1, rows_not_best=0,
        groups=3, groups_without_signal=2, groups_of_one_valid_row=1, groups_without_valid_rows=1, groups_trained=1,
        groups_surplus=0, groups_short=0,
    )  # fmt: skip


def test_an_invalid_row_is_left_out_of_its_group_whatever_number_it_holds():
    result = compute([1, 0, 1e9], [0, 0, 0], [True, True, False], k=3)
    np.testing.assert_array_equal(result.advantage_N, [1, -1, 0])
    assert np.isnan(result.reward_N[2])


def test_reference_values():
    result = compute([1.2, 0.4, 2.1, 0.8], [0] * 4, k=4)
    np.testing.assert_allclose(result.advantage_N, [0.1, -2.9 / 3, 1.3, -1.3 / 3], rtol=0, atol=1e-15)


def test_loo_std_is_never_divided_by():
    result = compute([0] + [0.95] * 7, [0] * 8, k=8)
    np.testing.assert_allclose(result.advantage_N, [-0.95] + [0.95 / 7] * 7, atol=1e-15)


@given(st.floats(-1e6, 1e6), st.integers(2, 9))
def test_a_flat_group_gives_exactly_zero(reward, k):
    result = compute([reward] * k, [0] * k, k=k)
    np.testing.assert_array_equal(result.advantage_N, np.zeros(k))
    assert result.counts.groups_without_signal == 1
    assert result.counts.rows_trained == k


def test_kl_first():
    policy = np.array([0.5, 0.0, 0.0, 0.5, 0.2])  # log-ratios to a reference at 0; A's padding of 8.5 is no token
    offsets = np.array([0, 2, 5])
    kl_N = sequence_kl(token_kl(policy, np.zeros(5)), offsets)
    np.testing.assert_allclose(kl_N, [0.5, 0.7])


def test_kl_first_enters_before_the_baseline():
    log_ratio = np.array([0.5, 0.5, 0.0, 0.5, 0.2])
    kl_N = sequence_kl(token_kl(log_ratio, np.zeros(5)), np.array([0, 2, 5]))
    result = compute([1, 0], [0, 0], kl=kl_N, beta=1.0)
    np.testing.assert_allclose(result.penalized_reward_N, [0, -0.7], atol=1e-15)
    np.testing.assert_allclose(result.advantage_N, [0.7, -0.7], atol=1e-15)
    np.testing.assert_array_equal(result.reward_N, [1, 0])


def test_kl_sign():
    estimates = {name: float(token_kl(np.array(-1.0), np.array(-1.2), name)) for name in ("k1", "k2", "k3", "abs")}
    assert estimates == pytest.approx({"k1": 0.2, "k2": 0.02, "k3": 0.0187307531, "abs": 0.2}, abs=1e-9)
    assert token_kl(np.array([-1.2]), np.array([-1.0])) == pytest.approx(-0.2)


def test_kl_estimators_in_expectation():
    rng = np.random.default_rng(0)
    policy, reference = (np.log(rng.dirichlet(np.ones(5))) for _ in range(2))
    exact = np.sum(np.exp(policy) * (policy - reference))
    for name in ("k1", "k3"):
        assert np.sum(np.exp(policy) * token_kl(policy, reference, name)) == pytest.approx(exact, abs=1e-12)
    for name in ("k2", "abs"):
        assert abs(np.sum(np.exp(policy) * token_kl(policy, reference, name)) - exact) > 1e-2


def test_sequence_kl_of_ragged_rows():
    tokens = np.array([9.0, 1.0, 2.0, 4.0, 9.0])
    offsets = np.array([1, 3, 3, 4], np.int32)  # the slice of an Arrow array need not start at 0
    np.testing.assert_array_equal(sequence_kl(tokens, offsets), [3, 0, 4])
    np.testing.assert_array_equal(sequence_kl(tokens, offsets, "length"), [1.5, 0, 4])
    np.testing.assert_array_equal(sequence_kl(np.zeros(0), np.array([0])), [])


def test_token_kl_refuses_unequal_shapes():
    with pytest.raises(ValueError, match="differ in shape"):
        token_kl(np.zeros(3), np.zeros(1))


def test_zero_std_after_kl():
    kl_N = np.array([0.1, 0.4, 0.2, 0.9])
    for beta in (0.0, 0.5):
        result = compute([1, 1, 0, 1], [0, 0, 1, 1], kl=kl_N, beta=beta)
        assert result.counts.groups_without_signal == 1
    assert result.advantage_N[0] == pytest.approx(0.15)


def test_filter_split():
    result = compute([1, 0, 0, 0], [0] * 4, k=4)
    np.testing.assert_allclose(result.advantage_N, [1, -1 / 3, -1 / 3, -1 / 3])
    assert result.counts.groups_without_signal == 0
    assert compute([0.95] * 8, [0] * 8, k=8).counts.groups_without_signal == 1


def test_rewards_are_clipped_before_the_kl():
    result = compute([9, -9], [0, 0], kl=np.array([1.0, 0.0]), beta=0.5, reward_clip_range=(-2, 3))
    np.testing.assert_array_equal(result.reward_N, [3, -2])
    np.testing.assert_array_equal(result.penalized_reward_N, [2.5, -2])


def test_beta_without_a_reference_is_refused():
    with pytest.raises(UserError, match=r"logprobs\.reference"):
        compute([1, 0], [0, 0], beta=0.1)
    assert np.isnan(compute([1, 0], [0, 0]).kl_N).all()


@pytest.mark.parametrize(
    ("reward", "kl", "what"), [(np.inf, 0.0, "reward"), (np.nan, 0.0, "reward"), (1.0, np.inf, "KL")]
)
def test_what_is_not_finite_is_refused(reward, kl, what):
    with pytest.raises(UserError, match=f"row 3, prompt_id prompt-1: its {what} is not finite"):
        compute([0, 1, 0, reward], [0, 0, 1, 1], kl=np.array([0, 0, 0, kl]), beta=0.1)


def test_what_advantages_and_evaluation_need_loads_no_torch():
    names = [
        "advantages",
        "correction",
        "gradient_variance",
        "kl",
        "normalization",
        "penalties",
        "schedule",
        "statistics",
    ]
    imports = "; ".join(f"import rloo_pipeline.objective.{name}" for name in names)
    code = f"import sys; {imports}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_leave_one_out_on_an_empty_batch():
    assert len(leave_one_out(np.zeros(0), np.zeros(0, int), np.zeros(0, bool))) == 0


def ragged(*rows):
    width = max(map(len, rows))
    mask = torch.tensor([[t < len(row) for t in range(width)] for row in rows])
    padded = [[*row, *[float("nan")] * (width - len(row))] for row in rows]
    return torch.tensor(padded, dtype=torch.float64), mask


def test_sequence_sum():
    logprobs, mask = ragged([-1.0] * 2, [-1.0] * 4)
    assert sequence_loss(logprobs, mask, torch.ones(2), 2).item() == 3.0


def test_accumulate():
    first = sequence_loss(*ragged([-1.0], [-1.0], [-1.0]), torch.ones(3), 4)
    second = sequence_loss(*ragged([-5.0]), torch.ones(1), 4)
    assert (first + second).item() == 2.0


def test_gradients_do_not_depend_on_the_microbatches():
    torch.manual_seed(0)
    lengths = torch.tensor([1, 7, 3, 5, 2, 7])
    mask = torch.arange(7) < lengths[:, None]
    advantages_N = torch.randn(6, dtype=torch.float64)
    values = torch.randn(6, 7, dtype=torch.float64)

    def gradient(sizes):
        leaf = values.clone().requires_grad_()
        for part in torch.arange(6).split(sizes):
            width = int(lengths[part].max())
            sequence_loss(leaf[part, :width].sin(), mask[part, :width], advantages_N[part], 6).backward()
        return leaf.grad

    for sizes in ([1] * 6, [4, 2], [1, 5]):
        torch.testing.assert_close(gradient(sizes), gradient([6]), rtol=0, atol=1e-12)


def test_loss_zero():
    logprobs = torch.full((2, 1), -0.7, dtype=torch.float64, requires_grad=True)
    loss = sequence_loss(logprobs, torch.full((2, 1), True), torch.tensor([1.0, -1.0]), 2)
    loss.backward()
    assert loss.item() == 0.0
    torch.testing.assert_close(logprobs.grad, torch.tensor([[-0.5], [0.5]], dtype=torch.float64))


def test_nothing_to_train_on_gives_a_finite_zero():
    logprobs = torch.full((2, 3), -1.0, requires_grad=True)
    loss = sequence_loss(logprobs, torch.full((2, 3), False), torch.zeros(2), 0)
    loss.backward()
    assert loss.item() == 0.0
    assert (logprobs.grad == 0).all()


def test_a_kl_that_is_not_finite_is_refused_also_without_a_penalty() -> None:
    """With beta in the loss the penalized rewards do not show it."""
    with pytest.raises(UserError, match="prompt_id prompt-0: its KL is not finite"):
        compute([1.0, 0.0], [0, 0], kl=np.array([0.0, np.inf]))
