"""How much memory each stage will take, from below: what surely is needed, and a guess of the rest."""

from dataclasses import dataclass
from typing import Any

from rloo_pipeline.config import Params
from rloo_pipeline.policy.logprobs import LOGITS_AT_ONCE
from rloo_pipeline.section import Dtype

BYTES: dict[Dtype, int] = {"float32": 4, "bfloat16": 2}
TRAINING_BYTES = 16  # of a parameter: float32 weight, gradient and AdamW's two moments


@dataclass(frozen=True)
class Need:
    """Bytes of one stage: `sure` is there whatever the batches are, `guessed` follows from the batch sizes."""

    stage: str
    parts: dict[str, int]
    sure: int

    @property
    def total(self) -> int:
        """All of it, bytes."""
        return sum(self.parts.values())


def kv_bytes(text: Any, dtype: Dtype) -> int:
    """Bytes of one token in the KV cache: keys and values of every layer."""
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    return 2 * int(text.num_hidden_layers) * int(heads) * _head(text) * BYTES[dtype]


def _head(text: Any) -> int:
    return int(getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)


def activation_bytes(text: Any, dtype: Dtype, *, checkpointed: bool) -> int:
    """Bytes that a token leaves for the backward pass.

    In each layer about eight tensors as wide as the hidden state, four as the keys and four as the MLP.
    """
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    wide = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    layer = (8 * text.hidden_size + 4 * heads * _head(text) + 4 * wide) * BYTES[dtype]
    kept = text.hidden_size * BYTES[dtype] * text.num_hidden_layers
    return int(kept + layer if checkpointed else layer * text.num_hidden_layers)


def logits_bytes(text: Any, tokens: int, copies: int) -> int:
    """Bytes of the float32 logits that are held at once for a batch of `tokens`."""
    return 4 * copies * min(LOGITS_AT_ONCE, tokens * int(text.vocab_size))


def of_weights(stage: str, parameters: int, dtype: Dtype) -> Need:
    """A model of which the weights alone are reckoned with."""
    weights = parameters * BYTES[dtype]
    return Need(stage, {"weights": weights}, weights)


def needs(params: Params, parameters: int, text: Any, prompt_tokens: int, engine: str, on_gpu: bool) -> list[Need]:
    """What the stages with the policy will take; prompt_tokens: the longest prompt."""
    completions = params.rollouts.prompts_drawn * params.rollouts.completions_per_prompt
    everything = completions * (prompt_tokens + params.rollouts.max_tokens)
    return [
        _rollouts(params, parameters, text, prompt_tokens, engine, on_gpu),
        _logprobs(params, parameters, text, everything),
        _update(params, parameters, text, everything),
    ]


def _rollouts(params: Params, parameters: int, text: Any, prompt_tokens: int, engine: str, on_gpu: bool) -> Need:
    dtype, length = params.rollouts.dtype, prompt_tokens + params.rollouts.max_tokens
    weights = parameters * BYTES[dtype]
    if engine == "vllm":
        # vLLM gives what it has to the cache; one completion at least must have room.
        cache = kv_bytes(text, dtype) * length if on_gpu else params.execution.cpu_kv_cache_gib * 2**30
        return Need("rollouts", {"weights": weights, "KV cache": cache}, weights + cache)
    rows = min(
        params.execution.generation_batch_size, params.rollouts.prompts_drawn * params.rollouts.completions_per_prompt
    )
    parts = {
        "weights": weights,
        "KV cache": kv_bytes(text, dtype) * length * rows,
        # Logits, their log-softmax and exponentials in float32, the cumulative sum in float64.
        "logits": 20 * rows * int(text.vocab_size),
    }
    return Need("rollouts", parts, weights)


def _logprobs(params: Params, parameters: int, text: Any, everything: int) -> Need:
    config, tokens = params.logprobs, min(everything, params.execution.logprobs_batch_tokens)
    # From the second iteration on, policy and reference differ, and both stay in memory.
    weights = parameters * BYTES[config.dtype] * (2 if config.reference and len(params.iterations) > 1 else 1)
    one_layer = activation_bytes(text, config.dtype, checkpointed=True) // 2
    return Need(
        "logprobs",
        {"weights": weights, "activations": one_layer * tokens, "logits": logits_bytes(text, tokens, 2)},
        weights,
    )


def _update(params: Params, parameters: int, text: Any, everything: int) -> Need:
    tokens, checkpointed = params.execution.update_microbatch_tokens, params.execution.gradient_checkpointing
    tokens = min(everything, tokens)
    trained = parameters * TRAINING_BYTES
    activations = activation_bytes(text, params.update.dtype, checkpointed=checkpointed) * tokens
    return Need(
        "update",
        {
            "weights, gradients and AdamW": trained,
            "activations": activations,
            "logits": logits_bytes(text, tokens, 3),
        },
        trained,
    )
