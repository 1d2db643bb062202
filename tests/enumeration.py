"""A softmax policy so small that every completion, and every group of them, can be written down."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch

from rloo_pipeline.objective.distribution import token_logprobs_of
from rloo_pipeline.objective.loss import sequence_loss

EOS = 2
COMPLETIONS = ((EOS,), (0, EOS), (1, EOS), (0, 0), (0, 1), (1, 0), (1, 1))  # two tokens at most, the last four cut
WIDTH = 2
IDS_CT = torch.tensor([(*ids, EOS)[:WIDTH] for ids in COMPLETIONS])
MASK_CT = torch.tensor([[position < len(ids) for position in range(WIDTH)] for ids in COMPLETIONS])
STATE_CT = torch.tensor([[0, 1 + min(ids[0], 1)] for ids in COMPLETIONS])  # nothing sampled yet, then "0" or "1"
TEMPERATURE = 0.7


def make_logits(seed: int, prompts: int = 1) -> torch.Tensor:
    """Logits [prompt, state, token] in float64."""
    return torch.randn(prompts, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def logprobs_of(logits_SV: torch.Tensor) -> torch.Tensor:
    """Log-prob of each token of each completion of one prompt, [C, T]; what stands at padding is meaningless."""
    flat = token_logprobs_of(logits_SV[STATE_CT].reshape(-1, 3), IDS_CT.reshape(-1), TEMPERATURE)
    return flat.reshape(IDS_CT.shape)


def probabilities_of(logits_SV: torch.Tensor) -> torch.Tensor:
    """Probability of each completion of one prompt, [C]."""
    return torch.where(MASK_CT, logprobs_of(logits_SV), 0).sum(-1).exp()


@dataclass(frozen=True)
class Drawn:
    """One way that the samples of all prompts may fall out, prompt by prompt."""

    completions_N: np.ndarray  # index into COMPLETIONS
    groups_N: np.ndarray
    probability: float


def every_draw(logits: torch.Tensor, completions_per_prompt: int) -> Iterator[Drawn]:
    """Every ordered draw of K completions for each prompt, with its probability."""
    prompts = len(logits)
    chance_PC = torch.stack([probabilities_of(logits_SV) for logits_SV in logits]).numpy()
    groups_N = np.repeat(np.arange(prompts), completions_per_prompt)
    for drawn in product(range(len(COMPLETIONS)), repeat=prompts * completions_per_prompt):
        completions_N = np.array(drawn)
        yield Drawn(completions_N, groups_N, float(chance_PC[groups_N, completions_N].prod()))


@contextmanager
def one_thread() -> Iterator[None]:
    """Thousands of tiny backward passes: on a busy machine their threads would mostly wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def expected_gradient(
    logits: torch.Tensor,
    completions_per_prompt: int,
    loss_of: Callable[[torch.Tensor, torch.Tensor, Drawn], torch.Tensor],
    sampler: torch.Tensor | None = None,
) -> torch.Tensor:
    """Gradient of the loss at `logits` [prompt, state, token], averaged over every draw by its probability.

    loss_of gets the drawn completions' log-probs [N, T], which carry the gradient, their mask, and the draw; sampler:
    the logits that the draws come from, if not those.
    """
    total = torch.zeros_like(logits)
    with one_thread():
        for drawn in every_draw(logits if sampler is None else sampler, completions_per_prompt):
            total += drawn.probability * _gradient(logits, drawn, loss_of)
    return total


def _gradient(
    logits: torch.Tensor, drawn: Drawn, loss_of: Callable[[torch.Tensor, torch.Tensor, Drawn], torch.Tensor]
) -> torch.Tensor:
    leaf = logits.clone().requires_grad_()
    all_PCT = torch.stack([logprobs_of(logits_SV) for logits_SV in leaf])
    logprobs_NT = all_PCT[drawn.groups_N, drawn.completions_N]
    loss_of(logprobs_NT, MASK_CT[drawn.completions_N], drawn).backward()
    assert leaf.grad is not None
    return leaf.grad


def policy_gradient(
    logits: torch.Tensor, value_of: Callable[[int, torch.Tensor], torch.Tensor], *, through_value: bool = False
) -> torch.Tensor:
    """Gradient of minus the mean over prompts of E[value], by autograd through the finite sum itself.

    value_of: prompt index and its completions' sequence log-probs [C] to their values [C]; through_value: whether the
    value's own dependence on the policy counts.
    """
    leaf = logits.clone().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for prompt, logits_SV in enumerate(leaf):
        probability_C = probabilities_of(logits_SV)
        value_C = value_of(prompt, probability_C.log())
        total = total - (probability_C * (value_C if through_value else value_C.detach())).sum() / len(leaf)
    (gradient,) = torch.autograd.grad(total, leaf)
    return gradient


def loss_with(advantages_of: Callable[[Drawn], np.ndarray]) -> Callable[..., torch.Tensor]:
    """The sequence loss over all rows of a draw with the advantages that `advantages_of` gives them."""

    def loss_of(logprobs_NT: torch.Tensor, mask_NT: torch.Tensor, drawn: Drawn) -> torch.Tensor:
        return sequence_loss(logprobs_NT, mask_NT, torch.from_numpy(advantages_of(drawn)), len(drawn.groups_N))

    return loss_of
