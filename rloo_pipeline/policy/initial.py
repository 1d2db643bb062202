"""Where the initial policy comes from: a directory, the hub, or weights inside a Python package."""

import importlib.util
import shutil
from pathlib import Path

from rloo_pipeline.config import PolicyConfig
from rloo_pipeline.errors import UserError
from rloo_pipeline.progress import say

# Nothing that is unpickled on loading (.bin, .pt) is ever taken.
KEPT = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt")
PACKAGE = "package:"
TEMPLATES = "additional_chat_templates"


def fetch(config: PolicyConfig, root: Path, target: Path, section: str = "policy") -> None:
    """Put the model's files (save_pretrained layout, safetensors alone) into the new directory `target`.

    section: where params.yaml names it, for messages. Raises UserError if the model cannot be found or holds no
    safetensors.
    """
    target.mkdir(parents=True)
    what = f"{section}.model {config.model}"
    if config.model.startswith(PACKAGE):
        from_package(config.model, target, what)
        return
    source = locate(config.model, config.revision, root, what, with_code=config.trust_remote_code)
    _copy(source, target, config.trust_remote_code)
    if not any(target.glob("*.safetensors")):
        raise UserError(
            f"{what}: no .safetensors file in it; convert the weights with save_pretrained, since "
            "formats that run code on loading are not read"
        )


def locate(model: str, revision: str | None, root: Path, what: str, *, with_code: bool = False) -> Path:
    """The directory `model` of the project, or of the hub's files; UserError that names `what` if neither is there."""
    directory = root / model
    if directory.is_dir():
        return directory
    if model.startswith((".", "/", "~")) or model.count("/") != 1:
        raise UserError(f"{what}: no such directory below {root.resolve()}")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    patterns = [*KEPT, *(["*.py"] if with_code else [])]
    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=patterns))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise UserError(
            f"{what}: neither a directory of that name nor to be had from the hub "
            f"({type(error).__name__}: {error}); check the name, the revision, the network and HF_TOKEN"
        ) from error


def _copy(source: Path, target: Path, with_code: bool) -> None:
    for pattern in (*KEPT, *(["*.py"] if with_code else [])):
        for path in source.glob(pattern):
            if path.name != "manifest.json":
                shutil.copyfile(path, target / path.name)
    if (source / TEMPLATES).is_dir():
        say(
            f"warning: {TEMPLATES}/ of the model is left out: prompts are rendered with its default chat template alone"
        )


def from_package(model: str, target: Path, what: str) -> None:
    """Put the model that a Python package carries into `target`; UserError that names `what` if there is none.

    model: `package:name[/file.gguf]`, which is de-quantized to float32, or `package:name/directory`.
    """
    place = place_in_package(model, what)
    if place.is_dir():
        _copy(place, target, with_code=False)
    else:
        say(f"de-quantizing {place.name}")
        _dequantize(place, target)


def place_in_package(model: str, what: str) -> Path:
    """The directory or the .gguf file that `package:...` names; UserError that names `what` if it is not there."""
    package, _, file = model.removeprefix(PACKAGE).partition("/")
    spec = importlib.util.find_spec(package) if package.isidentifier() else None
    if spec is None or spec.origin is None:
        raise UserError(f"{what}: the Python package {package} is not installed; pip install it")
    directory = Path(spec.origin).parent
    if file and (directory / file).is_dir():
        return directory / file
    found = [directory / file] if file else sorted(directory.glob("*.gguf"))
    if len(found) != 1 or not found[0].is_file():
        names = ", ".join(path.name for path in found) or "none"
        raise UserError(f"{what}: one .gguf file is needed in {package}; found: {names}")
    return found[0]


def _dequantize(file: Path, target: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    quantized = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    # A model marked as quantized cannot be saved: the weights go into one that is built anew.
    settings = quantized.config.to_dict()
    for key in ("quantization_config", "_name_or_path"):
        settings.pop(key, None)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings), dtype=torch.float32)
    model.load_state_dict(quantized.state_dict())
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(target)
