"""Messages in parts, as datasets for vision-language models have them."""

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from trl.data_utils import prepare_multimodal_messages

from rloo_pipeline.config import PromptsConfig
from rloo_pipeline.data.images import COLUMN, IMAGES, with_parts
from rloo_pipeline.data.keep import Rows
from rloo_pipeline.data.prompts import MESSAGES, prompt_table
from rloo_pipeline.data_config import DatasetConfig
from rloo_pipeline.errors import UserError

IMAGE = {"type": "image", "text": None}


def text(some: str) -> dict[str, Any]:
    return {"type": "text", "text": some}


def message(role: str, *parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": role, "content": list(parts)}


def prompts(cells: list[Any], images: list[Any] | None = None) -> pa.Array:
    table = pa.table({"prompt": cells})
    if images is not None:
        table = table.append_column(COLUMN, pa.array(images, IMAGES))
    rows = Rows("data.jsonl", table, np.arange(len(cells)))
    config = PromptsConfig(train={"file": "data.jsonl"}, eval={"fraction": 0.5})
    return prompt_table(rows, DatasetConfig(file="data.jsonl"), config, "train")["prompt"]


def test_parts_are_read_as_trl_reads_them() -> None:
    cells = [
        [
            message("system", text("Look.")),
            message("user", IMAGE, IMAGE, text("Which?")),
            message("assistant", text("1")),
        ],
        [message("user", text("Hi "), text("there"))],
    ]
    found = prompts(cells, [[b"a", b"b"], None])
    assert found.type == MESSAGES
    plain = found.to_pylist()
    assert plain[1] == [{"role": "user", "content": "Hi there"}]
    bare = [
        {**turn, "content": [{k: v for k, v in part.items() if v} for part in turn["content"]]} for turn in cells[0]
    ]
    shown = with_parts(plain[0], [{"image": b"a"}, {"image": b"b"}])
    assert shown == prepare_multimodal_messages(bare, [b"a", b"b"])


def test_text_in_parts_without_images() -> None:
    assert prompts([[message("user", text("Hi"))]]).to_pylist() == [[{"role": "user", "content": "Hi"}]]


@pytest.mark.parametrize(
    ("cell", "images", "what"),
    [
        ([message("user", text("a"), IMAGE)], [b"x"], "an image stands elsewhere than before the text of the first"),
        ([message("user", text("a")), message("user", IMAGE, text("b"))], [b"x"], "an image stands elsewhere"),
        ([message("system", IMAGE, text("a")), message("user", text("b"))], [b"x"], "an image stands elsewhere"),
        ([message("user", IMAGE, text("a"))], [b"x", b"y"], "1 parts of type image for 2 images"),
        ([message("user", IMAGE, text("a"))], None, "1 parts of type image for 0 images"),
        ([message("user", {"type": "video", "text": None})], None, "a part of type video; parts of messages are"),
        ([message("user", text(""))], None, "every message is empty"),
    ],
)
def test_parts_that_cannot_be_kept_as_they_are(cell: Any, images: Any, what: str) -> None:
    cells, given = [[message("user", text("fine"))], cell], None if images is None else [None, images]
    with pytest.raises(UserError, match=f"data.jsonl, column prompt, row 2: {what}"):
        prompts(cells, given)
