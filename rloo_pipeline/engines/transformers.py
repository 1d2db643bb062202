"""Generation by the transformers library: always there, slower than vLLM."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import transformers
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from rloo_pipeline.config import ExecutionConfig
from rloo_pipeline.engines import Request, Sample
from rloo_pipeline.engines.checks import check_model, check_requests
from rloo_pipeline.engines.eos import eos_token_ids
from rloo_pipeline.policy.images import load_vision
from rloo_pipeline.policy.load import load_model
from rloo_pipeline.policy.logprobs import NEVER
from rloo_pipeline.progress import Progress


def uniforms(requests: Sequence[Request], steps: int) -> torch.Tensor:
    """Numbers in [0, 1), float64 [N, steps]: row n by the seed of request n alone."""
    rows = [np.random.Generator(np.random.Philox(request.seed)).random(steps) for request in requests]
    return torch.from_numpy(np.stack(rows))


def draw(logits_NV: torch.Tensor, uniform_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample by the inverse of the cumulative distribution: ids [N] int64 and their log-probs [N] float32.

    logits_NV: float32, already divided by the temperature; uniform_N: float64 in [0, 1).
    """
    logprobs_NV = torch.log_softmax(logits_NV, dim=-1)
    cumulative_NV = logprobs_NV.exp().cumsum(dim=-1, dtype=torch.float64)
    total_N = cumulative_NV[:, -1]
    # Below the total even if the product rounds up: a token of probability 0 is never drawn.
    target_N = torch.minimum(uniform_N * total_N, torch.nextafter(total_N, torch.zeros_like(total_N)))
    ids_N1 = torch.searchsorted(cumulative_NV, target_N[:, None], right=True)
    return ids_N1[:, 0], logprobs_NV.gather(1, ids_N1)[:, 0]


class Draw(LogitsProcessor):  # type: ignore[misc]
    """Leaves the library's greedy choice only the token drawn for each row, and keeps its log-prob."""

    def __init__(self, uniforms_NT: torch.Tensor, temperature: float, never: Sequence[int] = ()) -> None:
        self.uniforms_NT, self.temperature = uniforms_NT, temperature
        self.never = torch.tensor(never, dtype=torch.int64, device=uniforms_NT.device)
        self.logprobs: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        step = len(self.logprobs)
        logits_NV = scores.float().index_fill(-1, self.never, NEVER) if len(self.never) else scores.float()
        ids_N, logprobs_N = draw(logits_NV / self.temperature, self.uniforms_NT[:, step])
        self.logprobs.append(logprobs_N)
        return torch.full_like(scores, -torch.inf).scatter_(1, ids_N[:, None], 0.0)


def left_padded(prompts: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and attention mask, int64 [N, T]."""
    width = max(len(prompt) for prompt in prompts)
    ids = torch.zeros(len(prompts), width, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    return ids, mask


class TransformersEngine:
    """Samples with `model.generate` and its cache, in batches of similar prompt length."""

    name = "transformers"

    def __init__(
        self,
        model: Path,
        *,
        max_model_len: int,
        max_tokens: int,
        temperature: float,
        dtype: Literal["float32", "bfloat16"],
        execution: ExecutionConfig,
        trust_remote_code: bool = False,
        images: bool = False,
    ) -> None:
        check_model(model)
        if execution.threads is not None:
            torch.set_num_threads(execution.threads)
        self.model: Any = load_model(model, dtype, trust_remote_code=trust_remote_code, images=images)
        self.vision = load_vision(model, trust_remote_code) if images else None
        self.never = list(self.vision.placeholders) if self.vision else []
        # generate() fills what is unset from the model's own defaults: top_p, penalties and the like.
        self.model.generation_config = GenerationConfig()
        self.device = self.model.device
        self.eos = eos_token_ids(model)
        self.max_model_len, self.max_tokens, self.temperature = max_model_len, max_tokens, temperature
        self.batch_size = execution.generation_batch_size
        self.settings: Mapping[str, Any] = {
            "engine": self.name,
            "engine_version": transformers.__version__,
            "device": self.device.type,
            "dtype": dtype,
            "threads": torch.get_num_threads(),
            "batch_size": self.batch_size,
            "max_model_len": max_model_len,
            "max_tokens": max_tokens,
            "temperature": temperature,
            "sampler": "inverse CDF, numpy Philox by request seed",
            "eos_token_ids": list(self.eos),
        }

    def generate(self, requests: Sequence[Request], done: Progress) -> list[Sample]:
        """One sample for each request, in the order of the requests; `done` is told after each batch.

        Raises UserError, before generating, if a prompt and max_tokens do not fit the context.
        """
        check_requests(requests, max_model_len=self.max_model_len, max_tokens=self.max_tokens)
        longest_first = sorted(range(len(requests)), key=lambda index: -len(requests[index].prompt_token_ids))
        samples: dict[int, Sample] = {}
        for start in range(0, len(requests), self.batch_size):
            places = longest_first[start : start + self.batch_size]
            samples.update(zip(places, self._batch([requests[place] for place in places]), strict=True))
            done.advance(len(places))
        return [samples[index] for index in range(len(requests))]

    def _batch(self, requests: Sequence[Request]) -> Iterator[Sample]:
        ids, mask = left_padded([request.prompt_token_ids for request in requests])
        drawing = Draw(uniforms(requests, self.max_tokens).to(self.device), self.temperature, self.never)
        images = [request.images for request in requests]
        seen = self.vision.inputs(images, ids, self.model) if self.vision else {}
        with torch.inference_mode():
            output = self.model.generate(
                ids.to(self.device),
                attention_mask=mask.to(self.device),
                **seen,
                logits_processor=LogitsProcessorList([drawing]),
                generation_config=GenerationConfig(
                    do_sample=False,
                    use_cache=True,
                    max_new_tokens=self.max_tokens,
                    eos_token_id=list(self.eos) or None,
                    pad_token_id=self.eos[0] if self.eos else 0,
                ),
            )
        completions_NT = output[:, ids.shape[1] :].cpu().numpy()
        logprobs_NT = torch.stack(drawing.logprobs, dim=1).cpu().numpy()
        ended_NT = np.isin(completions_NT, self.eos)
        for tokens_T, logprobs_T, ended_T in zip(completions_NT, logprobs_NT, ended_NT, strict=True):
            stopped = bool(ended_T.any())
            length = int(ended_T.argmax()) + 1 if stopped else len(tokens_T)
            yield Sample(tokens_T[:length].tolist(), logprobs_T[:length].tolist(), "stop" if stopped else "length")

    def close(self) -> None:
        """Give back all memory."""
        self.model = None
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
