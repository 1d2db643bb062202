"""Gradients shortened to a few thousand numbers that keep their inner products (Charikar et al. 2002, count sketch)."""

from collections.abc import Sequence

import torch


class CountSketch:
    """A fixed random linear map from gradients to [buckets]; inner products are unbiased.

    Every entry of the gradient is added, with a random sign, to a random bucket, so <s(x), s(y)> has mean <x, y> and a
    standard deviation of at most sqrt(2 / buckets) |x| |y|. Memory: 4 bytes per parameter.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], buckets: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.buckets = buckets
        # Code 2b adds to bucket b, 2b + 1 subtracts from it.
        self._codes = [
            torch.randint(2 * buckets, (p.numel(),), generator=generator, dtype=torch.int32).to(p.device)
            for p in parameters
        ]

    def __call__(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        """The sketch, float64 [buckets], of one gradient per parameter in the order given at the start."""
        total = torch.zeros(2 * self.buckets, dtype=torch.float64, device=gradients[0].device)
        for codes, gradient in zip(self._codes, gradients, strict=True):
            total.index_add_(0, codes, gradient.flatten().double())
        signed = total.view(self.buckets, 2)
        return signed[:, 0] - signed[:, 1]
