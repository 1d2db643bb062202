"""What reward models and judges share: their files, their tokens, and giving their memory back."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rloo_pipeline.errors import UserError
from rloo_pipeline.policy.initial import PACKAGE, from_package, locate
from rloo_pipeline.rewards.scored import Scored

ScoreRows = Callable[[pa.Table], Scored]
Ids = list[int]


@contextmanager
def model_files(model: str, revision: str | None, root: Path, what: str) -> Iterator[Path]:
    """The directory of a model of the project, the hub or a Python package; UserError, which names `what`."""
    if not model.startswith(PACKAGE):
        yield _whole(locate(model, revision, root, what), what)
        return
    with TemporaryDirectory() as directory:
        from_package(model, Path(directory), what)
        yield _whole(Path(directory), what)


def _whole(directory: Path, what: str) -> Path:
    if not any(directory.glob("*.safetensors")):
        raise UserError(
            f"{what}: no .safetensors file in it; convert the weights with save_pretrained, since formats that run "
            "code on loading are not read"
        )
    return directory


@contextmanager
def freed(model: Any) -> Iterator[None]:
    """On leaving, give back the model's memory, also where something still refers to it."""
    import torch

    try:
        yield
    finally:
        model.to("meta")
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def tokenize(texts: Sequence[str], tokenizer: Any, *, by_template: bool) -> list[Ids]:
    """Token ids of each text; the tokenizer adds its special tokens unless a chat template wrote them."""
    if not texts:
        return []
    given = tokenizer(list(texts), add_special_tokens=not by_template, verbose=False)
    ids: list[Ids] = given["input_ids"]
    return ids


def lengths_of(ids: Sequence[Ids]) -> npt.NDArray[np.int64]:
    """Tokens of each row."""
    return np.fromiter(map(len, ids), np.int64, len(ids))


def context_of(model: Any, tokenizer: Any) -> int:
    """The most tokens that the model can see."""
    known = [tokenizer.model_max_length, getattr(model.config.get_text_config(), "max_position_embeddings", None)]
    places: Any = getattr(getattr(model.base_model, "embeddings", None), "position_embeddings", None)
    if getattr(places, "padding_idx", None) is not None:  # RoBERTa's kind counts positions from behind the pad id.
        known.append(places.num_embeddings - places.padding_idx - 1)
    return int(min(length for length in known if length is not None and length > 0))  # XLNet's -1: no limit


def misfits(lengths_N: npt.NDArray[np.int64], longest: int, model: str) -> dict[int, str]:
    """Why a row cannot be given to the model, by its index."""
    wrong = np.flatnonzero((lengths_N > longest) | (lengths_N == 0))
    return {int(row): f"has {lengths_N[row]} tokens for {model}, which takes 1 to {longest}" for row in wrong}
