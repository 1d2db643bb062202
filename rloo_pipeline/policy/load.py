"""Loading a policy from its directory: no dropout, no code of its own unless allowed."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rloo_pipeline.errors import UserError

ATTENTION = "sdpa"

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def device() -> "torch.device":
    """The accelerator if there is one, else the CPU."""
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def pass_conditions(**batch_shapes: int | bool) -> dict[str, Any]:
    """What the last bits of a pass depend on beside weights, rows and versions, for the provenance."""
    import torch

    conditions = {"attention": ATTENTION, "threads": torch.get_num_threads(), **batch_shapes}
    if torch.cuda.is_available():
        return {**conditions, "cuda": str(torch.version.cuda)}
    return {**conditions, "cpu_capability": torch.backends.cpu.get_cpu_capability()}


def load_tokenizer(model: Path, trust_remote_code: bool = False) -> "PreTrainedTokenizerBase":
    """The tokenizer in a model's directory."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model, trust_remote_code=trust_remote_code, local_files_only=True)
    except (OSError, ValueError) as error:
        raise UserError(f"{model}: no tokenizer could be loaded from it: {error}") from error


def load_config(model: Path, trust_remote_code: bool = False) -> Any:
    """The model's configuration with every rate of dropout, of tokens or of layers, set to 0.

    Dropout would make two passes over the same tokens differ, so that no ratio is exactly 1. Raises UserError if
    config.json is missing or not of a known architecture.
    """
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code, local_files_only=True)
    except (OSError, ValueError) as error:
        raise UserError(f"{model / 'config.json'}: no configuration could be loaded from it: {error}") from error
    parts = [getattr(config, name, None) for name in getattr(config, "sub_configs", {})]  # as that of an image encoder
    for part in (config, config.get_text_config(), *(part for part in parts if part is not None)):
        for key, value in part.to_dict().items():
            if isinstance(value, float) and "drop" in key:
                setattr(part, key, 0.0)
    return config


def load_model(model: Path, dtype: str, *, trust_remote_code: bool = False, images: bool = False) -> "PreTrainedModel":
    """The causal language model in a directory, on the device, in evaluation mode; dtype as torch names it.

    images: whether it is loaded with what it sees images by.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.utils import logging

    logging.disable_progress_bar()
    config = load_config(model, trust_remote_code)
    if not any(model.glob("*.safetensors")):
        raise UserError(f"{model}: no .safetensors file in it; formats that run code on loading are not read")
    auto = AutoModelForImageTextToText if images else AutoModelForCausalLM
    loaded: PreTrainedModel = auto.from_pretrained(
        model,
        config=config,
        dtype=getattr(torch, dtype),
        attn_implementation=ATTENTION,
        trust_remote_code=trust_remote_code,
        local_files_only=True,
        use_safetensors=True,
    )
    return loaded.to(device()).eval()


def context_length(model: Path, trust_remote_code: bool = False) -> int:
    """The most tokens the model can see; raises UserError if its configuration does not say."""
    length = getattr(load_config(model, trust_remote_code).get_text_config(), "max_position_embeddings", None)
    if not isinstance(length, int):
        raise UserError(f"{model / 'config.json'}: max_position_embeddings is missing, so the context is not known")
    return length
