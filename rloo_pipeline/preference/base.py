"""What a reward model starts from: a pretrained model with a head of one logit, new if the base has none."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rloo_pipeline.errors import UserError
from rloo_pipeline.policy.load import device, load_config, load_tokenizer
from rloo_pipeline.progress import say
from rloo_pipeline.rewards.loading import context_of
from rloo_pipeline.rewards.model import takes_padding


@dataclass(frozen=True)
class Scorer:
    """A model with one logit, on the device, and its tokenizer; `added` names the weights that the base lacked."""

    model: Any
    tokenizer: Any
    added: list[str]

    @property
    def longest(self) -> int:
        """The most tokens it can see."""
        return context_of(self.model, self.tokenizer)


def load_base(directory: Path, seed: int, where: str) -> Scorer:
    """The base in a directory in float32 without dropout, the head drawn from `seed` if the base has none.

    Its pad token is the tokenizer's, else EOS: heads that score the last token need to know which one is padding.
    Raises UserError that begins with `where` if the base cannot be one.
    """
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForSequenceClassification

    try:
        tokenizer, config = load_tokenizer(directory), load_config(directory)
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
    _one_logit(config, where)
    _set_pad(config, tokenizer, where)
    with torch.random.fork_rng(), _silent():
        torch.manual_seed(seed)
        try:
            model, report = AutoModelForSequenceClassification.from_pretrained(
                directory,
                config=config,
                dtype=torch.float32,
                trust_remote_code=False,
                local_files_only=True,
                use_safetensors=True,
                output_loading_info=True,
            )
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            raise UserError(f"{where}: no sequence classification model could be made of it: {error}") from error
    added = sorted(report["missing_keys"])
    body = [key for key in added if key.startswith(f"{model.base_model_prefix}.") and ".pooler." not in key]
    if body:
        raise UserError(f"{where}: has no weights for {', '.join(body[:3])}; the base must be whole, its head apart")
    if added:
        say(f"{where}: has no weights for {', '.join(added)}; they are drawn from the seed and trained")
    model = model.to(device()).eval()
    if not takes_padding(model):
        raise UserError(
            f"{where}: padding beside a row changes its score, as in encoder-decoders, FNet and XLNet, so it cannot be "
            "trained in batches; name an encoder or a decoder of another kind"
        )
    return Scorer(model, tokenizer, added)


@contextmanager
def _silent() -> Iterator[None]:
    """No progress bar and no report on weights that the base lacks, which is told in one line instead."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _one_logit(config: Any, where: str) -> None:
    classifier = any(name.endswith("ForSequenceClassification") for name in config.architectures or ())
    if classifier and config.num_labels != 1:
        raise UserError(
            f"{where}: is a classifier with {config.num_labels} logits, a reward model has one; name a base without a "
            "head, or one with a single logit"
        )
    config.num_labels = 1
    config.problem_type = None


def _set_pad(config: Any, tokenizer: Any, where: str) -> None:
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise UserError(
                f"{where}: its tokenizer has neither a pad nor an EOS token; set one in tokenizer_config.json"
            )
        tokenizer.pad_token = tokenizer.eos_token
    config.get_text_config().pad_token_id = tokenizer.pad_token_id
