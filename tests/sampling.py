"""What tests of every engine share: a progress that counts, scores of a plain forward pass, a chi-square test."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch

from rloo_pipeline.engines import Request, Sample


class Counter:
    """Progress that counts."""

    def __init__(self) -> None:
        self.done = 0

    def advance(self, units: int = 1) -> None:
        self.done += units


def ragged_requests(count: int, first_seed: int = 100) -> list[Request]:
    """Prompts of 1 to 23 ordinary tokens of the tiny model."""
    generator = torch.Generator().manual_seed(0)
    lengths = [1 + 7 * index % 23 for index in range(count)]
    prompts = [torch.randint(2, 258, (length,), generator=generator).tolist() for length in lengths]
    return [Request(prompt, first_seed + index) for index, prompt in enumerate(prompts)]


@torch.inference_mode()
def forward_logprobs(
    model: torch.nn.Module, prompt: Sequence[int], completion: Sequence[int], temperature: float
) -> list[float]:
    """Log-probs of a completion's tokens by one pass over the whole sequence, without padding or cache."""
    ids = torch.tensor([[*prompt, *completion]])
    logits_TV = model(input_ids=ids, use_cache=False).logits[0].float() / temperature
    scored_TV = torch.log_softmax(logits_TV[len(prompt) - 1 : -1], dim=-1)
    return scored_TV.gather(1, torch.tensor(completion)[:, None])[:, 0].tolist()


def chi_square_p(drawn: Sequence[int], probabilities_V: torch.Tensor) -> float:
    """P-value of Pearson's chi-square test; cells that expect fewer than 5 draws are pooled into one."""
    expected_V = probabilities_V.double() * len(drawn)
    observed_V = torch.bincount(torch.tensor(drawn), minlength=len(expected_V)).double()
    rare_V = expected_V < 5
    expected = torch.cat([expected_V[~rare_V], expected_V[rare_V].sum()[None]])
    observed = torch.cat([observed_V[~rare_V], observed_V[rare_V].sum()[None]])
    statistic = ((observed - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((len(expected) - 1) / 2).double(), statistic / 2))


def set_eos(model: Path, ids: list[int] | None) -> Path:
    """Make these ids, and no others, end a completion of the saved model."""
    for name in ("config.json", "generation_config.json"):
        values = json.loads((model / name).read_text())
        (model / name).write_text(json.dumps(values | {"eos_token_id": ids}))
    tokenizer = model / "tokenizer_config.json"
    tokenizer.write_text(json.dumps(json.loads(tokenizer.read_text()) | {"eos_token": None}))
    return model


def set_tokenizer_eos(model: Path, token_id: int) -> Path:
    """Make this id the EOS of the saved model's tokenizer, and of it alone."""
    vocabulary = json.loads((model / "tokenizer.json").read_text())["model"]["vocab"]
    [token] = [token for token, number in vocabulary.items() if number == token_id]
    path = model / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token": token}))
    return model


def assert_ends_at_eos(endless: Sequence[Sample], ended: Sequence[Sample], eos: Sequence[int]) -> None:
    """Each sample is the endless one up to its first EOS, which is kept and has its log-prob."""
    assert {sample.finish_reason for sample in endless} == {"length"}
    assert {sample.finish_reason for sample in ended} == {"length", "stop"}
    for full, cut in zip(tokens(endless), ended, strict=True):
        stops = [place for place, token in enumerate(full) if token in eos]
        assert cut.finish_reason == ("stop" if stops else "length")
        assert cut.token_ids == (full[: stops[0] + 1] if stops else full)
        assert len(cut.logprobs) == len(cut.token_ids)


def add_sampling_defaults(model: Path) -> Path:
    """Give the saved model a generation_config.json that would sample from another distribution."""
    path = model / "generation_config.json"
    bad = {"do_sample": True, "top_k": 1, "top_p": 0.1, "min_p": 0.5, "temperature": 0.1, "repetition_penalty": 1.7}
    path.write_text(json.dumps(json.loads(path.read_text()) | bad))
    return model


def tokens(samples: Sequence[Sample]) -> list[list[int]]:
    """The token ids of each sample."""
    return [list(sample.token_ids) for sample in samples]


def largest_gap(left: Sequence[Sample], right: Sequence[Sample]) -> float:
    """The largest difference of log-probs between samples of the same tokens."""
    pairs = zip(left, right, strict=True)
    return max(abs(a - b) for x, y in pairs for a, b in zip(x.logprobs, y.logprobs, strict=True))
