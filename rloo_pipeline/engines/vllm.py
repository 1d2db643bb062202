"""Generation by vLLM inside this process, on a GPU or on a CPU."""

import gc
import logging
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal

from rloo_pipeline.config import ExecutionConfig
from rloo_pipeline.data.images import decode
from rloo_pipeline.engines import Request, Sample
from rloo_pipeline.engines.checks import check_model, check_requests
from rloo_pipeline.engines.eos import eos_token_ids
from rloo_pipeline.errors import UserError
from rloo_pipeline.policy.images import load_vision
from rloo_pipeline.progress import Progress

GIB = 2**30
CPU_BATCH_TOKENS = 4096
CPU_MAX_SEQUENCES = 128


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Importing and building make objects that stay: looking for garbage among them is a third of the start-up."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def import_vllm() -> Any:
    """The module vllm, set to run in this process, quietly and without telemetry; raises what its import raises."""
    # One process: a second one would add seconds, and its threads make results vary.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    os.environ["DO_NOT_TRACK"] = "1"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])
    with _no_garbage_collection():
        import vllm
        from vllm import EngineArgs, LLMEngine, SamplingParams  # noqa: F401  (vllm imports its parts on demand)
        from vllm.platforms import current_platform

    if current_platform.is_unspecified():
        raise RuntimeError("vllm finds no device that it was built for")
    return vllm


class VllmEngine:
    """Samples with vLLM; on a CPU without compiling, which would need a C++ compiler and most of a minute."""

    name = "vllm"

    def __init__(
        self,
        model: Path,
        *,
        max_model_len: int,
        max_tokens: int,
        temperature: float,
        dtype: Literal["float32", "bfloat16"],
        seed: int,
        execution: ExecutionConfig,
        trust_remote_code: bool = False,
        images: bool = False,
    ) -> None:
        check_model(model)
        self.vllm = import_vllm()
        import torch
        from vllm.platforms import current_platform

        self.on_cpu = current_platform.is_cpu()
        if execution.threads is not None:
            torch.set_num_threads(execution.threads)
        self.eos = eos_token_ids(model)
        self.max_model_len, self.max_tokens, self.temperature = max_model_len, max_tokens, temperature
        self.vision = load_vision(model, trust_remote_code) if images else None
        # The lowest that vLLM takes: as good as never.
        self.never = dict.fromkeys(self.vision.placeholders, -100.0) if self.vision else None
        arguments = {
            "dtype": dtype,
            "seed": seed % 2**32,
            "max_model_len": max_model_len,
            "generation_config": "vllm",
            "logprobs_mode": "processed_logprobs",
            **self._device_arguments(),
        }
        self.engine = self._start(
            model=str(model), trust_remote_code=trust_remote_code, **arguments, **self._memory(execution)
        )
        self.settings: Mapping[str, Any] = {
            "engine": self.name,
            "engine_version": self.vllm.__version__,
            "device": current_platform.device_type,
            "threads": torch.get_num_threads(),
            **arguments,
            "max_tokens": max_tokens,
            "temperature": temperature,
            "sampler": "vLLM's, seeded by request",
            "eos_token_ids": list(self.eos),
        }

    def _start(self, **arguments: Any) -> Any:
        gc.freeze()  # vLLM collects garbage several times on its way; close() thaws.
        with _no_garbage_collection(), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            try:
                return self.vllm.LLMEngine.from_engine_args(
                    self.vllm.EngineArgs(
                        load_format="safetensors",
                        skip_tokenizer_init=self.vision is None,
                        disable_log_stats=True,
                        use_tqdm_on_load=False,
                        **arguments,
                    )
                )
            except ValueError as error:
                raise UserError(
                    f"{arguments['model']}: vLLM does not start: {error}; if it is about memory, change "
                    "execution.cpu_kv_cache_gib (CPU) or execution.gpu_memory_utilization (GPU); or set the engine to "
                    "transformers"
                ) from error

    def _memory(self, execution: ExecutionConfig) -> dict[str, Any]:
        if self.on_cpu:
            return {"kv_cache_memory_bytes": execution.cpu_kv_cache_gib * GIB}
        return {"gpu_memory_utilization": execution.gpu_memory_utilization}

    def _device_arguments(self) -> dict[str, Any]:
        if not self.on_cpu:
            return {}
        # vLLM rewinds a request's generator after a chunk of a prompt, which the CPU's generators cannot do.
        return {
            "enforce_eager": True,
            "enable_chunked_prefill": False,
            "async_scheduling": False,
            "max_num_batched_tokens": max(self.max_model_len, CPU_BATCH_TOKENS),
            "max_num_seqs": CPU_MAX_SEQUENCES,
        }

    def generate(self, requests: Sequence[Request], done: Progress) -> list[Sample]:
        """One sample for each request, in the order of the requests; `done` is told of each that ended.

        Raises UserError, before generating, if a prompt and max_tokens do not fit the context.
        """
        import torch

        check_requests(requests, max_model_len=self.max_model_len, max_tokens=self.max_tokens)
        if not self.engine.reset_prefix_cache():
            raise RuntimeError("vLLM did not reset its prefix cache, so results could depend on earlier requests")
        # vLLM compiles parts of its sampler even in eager mode.
        with torch.compiler.set_stance("force_eager") if self.on_cpu else nullcontext():
            samples = self._run(requests, done)
        return [samples[index] for index in range(len(requests))]

    def _run(self, requests: Sequence[Request], done: Progress) -> dict[int, Sample]:
        for index, request in enumerate(requests):
            self.engine.add_request(str(index), self._prompt(request), self._parameters(request.seed))
        samples: dict[int, Sample] = {}
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                if output.finished:
                    number = int(output.request_id)
                    _check_prompt(requests[number], output)
                    samples[number] = _sample(output)
                    done.advance()
        return samples

    def _prompt(self, request: Request) -> dict[str, Any]:
        """With images the ids have one placeholder for each, since vLLM puts in the others itself."""
        if self.vision is None or not request.images:
            return {"prompt_token_ids": list(request.prompt_token_ids)}
        images = {"image": [decode(image) for image in request.images]}
        return {"prompt_token_ids": self.vision.unexpanded(request.prompt_text), "multi_modal_data": images}

    def _parameters(self, seed: int) -> Any:
        return self.vllm.SamplingParams(
            temperature=self.temperature,
            max_tokens=self.max_tokens,
            seed=seed,
            logprobs=0,
            stop_token_ids=list(self.eos),
            detokenize=False,
            logit_bias=self.never,
        )

    def close(self) -> None:
        """Give back all memory."""
        self.engine.engine_core.shutdown()
        self.engine = None


def _check_prompt(request: Request, output: Any) -> None:
    """Raise UserError if vLLM put other placeholders of images into a prompt than those that are trained on."""
    if request.images and list(output.prompt_token_ids) != list(request.prompt_token_ids):
        raise UserError(
            f"vLLM reads a prompt with images as {len(output.prompt_token_ids)} tokens, the policy's processor as "
            f"other {len(request.prompt_token_ids)}; set the engine to transformers"
        )


def _sample(output: Any) -> Sample:
    completion = output.outputs[0]
    token_ids = list(completion.token_ids)
    logprobs = [step[token].logprob for token, step in zip(token_ids, completion.logprobs, strict=True)]
    if completion.finish_reason not in ("stop", "length"):
        raise UserError(f"vLLM ended a completion with {completion.finish_reason!r}; run the stage again")
    return Sample(token_ids, logprobs, completion.finish_reason)
