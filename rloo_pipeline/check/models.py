"""What can be known of a model without loading its weights."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rloo_pipeline.check.report import Report
from rloo_pipeline.disk import parameters
from rloo_pipeline.errors import UserError
from rloo_pipeline.policy.initial import KEPT, PACKAGE, place_in_package

Kind = Literal["AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModelForSequenceClassification"]


class NotAtHand(Exception):
    """The model may be all right, but the hub cannot be asked."""


@dataclass(frozen=True)
class Model:
    """Configuration, tokenizer and number of parameters."""

    directory: Path
    config: Any
    tokenizer: Any
    parameters: int

    @property
    def text(self) -> Any:
        """The configuration of the part that reads text."""
        return self.config.get_text_config()

    @property
    def context(self) -> int | None:
        """The most tokens that it sees."""
        length = getattr(self.text, "max_position_embeddings", None)
        return length if isinstance(length, int) else None


def examine(
    where: str,
    name: str,
    revision: str | None,
    root: Path,
    kind: Kind,
    report: Report,
    *,
    trust_remote_code: bool = False,
) -> Model | None:
    """What `look` gives; None, with an error or a warning, where it cannot look."""
    try:
        return look(name, revision, root, kind, trust_remote_code=trust_remote_code)
    except NotAtHand as error:
        report.warning(where, str(error))
    except UserError as error:
        report.error(where, str(error))
    return None


def look(name: str, revision: str | None, root: Path, kind: Kind, *, trust_remote_code: bool = False) -> Model:
    """The model `name` (directory, hub id or package:...), its weights not read beyond their headers.

    Raises UserError if it cannot be there, NotAtHand if the hub cannot be asked.
    """
    from safetensors import SafetensorError
    from transformers import AutoConfig, AutoTokenizer

    directory, options = _files(name, revision, root, trust_remote_code)
    try:
        config = AutoConfig.from_pretrained(directory, trust_remote_code=trust_remote_code, **options)
        tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=trust_remote_code, **options)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise UserError(f"{name}: configuration or tokenizer cannot be read: {error}") from error
    try:
        stored = 0 if options else parameters(directory)
    except SafetensorError as error:
        raise UserError(f"{name}: a .safetensors file of it is not whole ({error}); restore it") from error
    return Model(directory, config, tokenizer, stored or _built(config, kind, name, trust_remote_code))


def _files(name: str, revision: str | None, root: Path, with_code: bool) -> tuple[Path, dict[str, str]]:
    """The directory with configuration and tokenizer, and what from_pretrained needs beside it."""
    if name.startswith(PACKAGE):
        place = place_in_package(name, name)
        return (place, {}) if place.is_dir() else (place.parent, {"gguf_file": place.name})
    if (root / name).is_dir():
        if not any((root / name).glob("*.safetensors")):
            raise UserError(f"{name}: no .safetensors file in it; convert the weights with save_pretrained")
        return root / name, {}
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise UserError(f"{name}: no such directory below {root.resolve()}")
    return _from_hub(name, revision, with_code), {}


def _from_hub(name: str, revision: str | None, with_code: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

    patterns = [pattern for pattern in (*KEPT, *(["*.py"] if with_code else [])) if pattern != "*.safetensors"]
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except (GatedRepoError, HFValidationError, RepositoryNotFoundError, RevisionNotFoundError) as error:
        raise UserError(f"{name}: {error}; check the name, the revision and HF_TOKEN") from error
    except Exception as error:  # whatever the network makes of it
        raise NotAtHand(
            f"{name} is neither in the hub's cache nor to be had now ({type(error).__name__}); what needs its "
            "tokenizer and configuration is not checked"
        ) from error


def _built(config: Any, kind: Kind, name: str, trust_remote_code: bool) -> int:
    """Parameters of a model of this configuration, made without memory for them."""
    import torch
    import transformers

    settings = {key: value for key, value in config.to_dict().items() if key != "quantization_config"}
    plain = config if trust_remote_code else transformers.AutoConfig.for_model(**settings)
    try:
        with torch.device("meta"):
            model = getattr(transformers, kind).from_config(plain, trust_remote_code=trust_remote_code)
    except (ValueError, KeyError, ImportError, TypeError) as error:
        raise UserError(f"{name}: no {kind.removeprefix('Auto')} can be made of its configuration: {error}") from error
    return int(model.num_parameters())
