"""Which token ids end a completion, read from a model's own files."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rloo_pipeline.errors import UserError


def _read(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not readable as JSON: {error}; save the model anew") from error
    return values if isinstance(values, dict) else {}


def _ids(value: Any) -> list[int]:
    if value is None:
        return []
    return [int(item) for item in value] if isinstance(value, list) else [int(value)]


def _content(token: Any) -> Any:
    """A special token stands in the files as its text or as a mapping with its content."""
    return token["content"] if isinstance(token, dict) else token


def _known_tokens(tokenizer: dict[str, Any], config: dict[str, Any]) -> dict[str, int]:
    vocabulary = tokenizer.get("model", {}).get("vocab", {})
    known = dict(vocabulary) if isinstance(vocabulary, dict) else {}
    if isinstance(vocabulary, list):  # Unigram: pairs of text and score, the id is the place
        known = {entry[0]: place for place, entry in enumerate(vocabulary)}
    known |= {entry["content"]: int(key) for key, entry in config.get("added_tokens_decoder", {}).items()}
    return known | {entry["content"]: entry["id"] for entry in tokenizer.get("added_tokens", [])}


def _of_tokenizer(directory: Path) -> Iterable[int]:
    config = _read(directory / "tokenizer_config.json")
    token = _content(config.get("eos_token") or _read(directory / "special_tokens_map.json").get("eos_token"))
    if token is None:
        return []
    known = _known_tokens(_read(directory / "tokenizer.json"), config)
    return [known[token]] if token in known else []


def eos_token_ids(model_dir: Path) -> tuple[int, ...]:
    """All ids that end a completion, ascending: of generation_config.json, config.json and the tokenizer; may be empty.

    Raises UserError for a file that is not JSON.
    """
    config = _read(model_dir / "config.json")
    text = config.get("text_config") or {}
    named = (_read(model_dir / "generation_config.json"), config, text)
    found = [i for values in named for i in _ids(values.get("eos_token_id"))]
    return tuple(sorted({*found, *_of_tokenizer(model_dir)}))
