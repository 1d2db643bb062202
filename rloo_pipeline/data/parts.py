"""Messages whose content is a list of parts, as chat templates of vision-language models take it, made plain ones."""

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from rloo_pipeline.data.images import COLUMN, has_images
from rloo_pipeline.data.keep import Rows
from rloo_pipeline.errors import UserError


def have_parts(messages: pa.Array) -> bool:
    """Whether the content of messages, lists of structs, is a list of structs with `type`."""
    content = _field(messages.type.value_type, "content")
    if content is None or not (pa.types.is_list(content) or pa.types.is_large_list(content)):
        return False
    return _field(content.value_type, "type") is not None


def without_parts(messages: pa.Array, rows: Rows, name: str) -> pa.Array:
    """The same messages with the text of their parts as content.

    Images are put before the first user's text when the prompt is read, so raises UserError, with the row, for images
    that stand elsewhere or are not as many as the row has, and for parts of other types.
    """
    table = rows.table
    counts_P = pc.fill_null(pc.list_value_length(table[COLUMN]), 0).to_pylist() if has_images(table) else None
    made = []
    for row, some in enumerate(messages.to_pylist()):
        try:
            made.append(None if some is None else _plain(some, 0 if counts_P is None else counts_P[row]))
        except UserError as error:
            raise UserError(f"{rows.place(row, name)}: {error}") from error
    return pa.array(made)


def _field(kind: pa.DataType, name: str) -> pa.DataType | None:
    place = kind.get_field_index(name) if pa.types.is_struct(kind) else -1
    return kind.field(place).type if place >= 0 else None


def _plain(messages: Sequence[Mapping[str, Any]], images: int) -> list[dict[str, Any]]:
    kinds = [[part.get("type") for part in message.get("content") or ()] for message in messages]
    other = {kind for some in kinds for kind in some} - {"text", "image"}
    if other:
        raise UserError(f"a part of type {other.pop()}; parts of messages are of type text or image")
    _check_images(messages, kinds, images)
    return [{**message, "content": _text(message.get("content"))} for message in messages]


def _check_images(messages: Sequence[Mapping[str, Any]], kinds: Sequence[Sequence[Any]], images: int) -> None:
    placed = sum(some.count("image") for some in kinds)
    if placed != images:
        raise UserError(
            f"{placed} parts of type image for {images} images (of prompts.images_column); give each image one part, "
            "or write the content as plain text"
        )
    users = [some for message, some in zip(messages, kinds, strict=True) if message.get("role") == "user"]
    if placed and (not users or list(users[0][:placed]) != ["image"] * placed):
        raise UserError("an image stands elsewhere than before the text of the first user message; move it there")


def _text(parts: Sequence[Mapping[str, Any]] | None) -> str | None:
    return None if parts is None else "".join(part.get("text") or "" for part in parts if part["type"] == "text")
