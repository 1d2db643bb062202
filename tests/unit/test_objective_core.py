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
    numpy_only = ("advantages", "correction", "gradient_variance", "kl", "normalization", "penalties", "statistics")
    imports = "; ".join(f"import rloo_pipeline.objective.{name}" for name in numpy_only)
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
