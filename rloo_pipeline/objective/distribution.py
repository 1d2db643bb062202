"""Log-probs and entropy of the distribution that is sampled: logits divided by the temperature."""

import torch


def _log_softmax(logits_RV: torch.Tensor, temperature: float) -> torch.Tensor:
    dtype = torch.promote_types(logits_RV.dtype, torch.float32)
    return torch.log_softmax(logits_RV.to(dtype) / temperature, dim=-1)


def token_logprobs_of(logits_RV: torch.Tensor, token_ids_R: torch.Tensor, temperature: float) -> torch.Tensor:
    """Log-prob of one token id per row at `temperature` > 0, nats; [R] float32, or float64 of float64 logits."""
    return _log_softmax(logits_RV, temperature).gather(-1, token_ids_R.unsqueeze(-1)).squeeze(-1)


def entropy_of(logits_RV: torch.Tensor, temperature: float) -> torch.Tensor:
    """Entropy of each row's distribution at `temperature` > 0, nats; [R] float32, or float64 of float64 logits."""
    probabilities_RV = _log_softmax(logits_RV, temperature).exp()
    entropy_R: torch.Tensor = torch.special.entr(probabilities_RV).sum(-1)
    return entropy_R
