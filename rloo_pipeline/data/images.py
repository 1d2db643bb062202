"""Images of prompts: read as people have them, kept as encoded bytes in the column `images`."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from rloo_pipeline.data.keep import Rows
from rloo_pipeline.errors import UserError
from rloo_pipeline.manifest import RESTORE
from rloo_pipeline.progress import say
from rloo_pipeline.shards import read_table, write_table

if TYPE_CHECKING:
    from PIL.Image import Image

COLUMN = "images"
# Below the shards of rollouts, in a folder of its own: whoever reads *.parquet beside the manifest reads rows alone.
FILE = Path("images") / "images.parquet"
# Offsets of 64 bits, because the images of a dataset are often more than 2 GiB.
IMAGES = pa.list_(pa.large_binary())
# Other formats of Pillow's start programs or are rarely meant (EPS calls Ghostscript).
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
ORIENTATION = 0x0112  # of EXIF

Encoded = Sequence[bytes]


def has_images(table: pa.Table) -> bool:
    """Whether `prepare` made the column `images`, which it does for vision-language policies alone."""
    return COLUMN in table.column_names and _is_made(table.schema.field(COLUMN).type)


def images_of(table: pa.Table) -> dict[str, Encoded] | None:
    """The encoded images of each prompt that has any, by prompt_id; None without a column of images."""
    if not has_images(table):
        return None
    some = table.filter(pc.greater(pc.fill_null(pc.list_value_length(table[COLUMN]), 0), 0))
    return dict(zip(some["prompt_id"].to_pylist(), some[COLUMN].to_pylist(), strict=True))


def write_images(directory: Path, images: Mapping[str, Encoded]) -> str:
    """Write the images of prompts, each once, below the shards of their rollouts; returns their fingerprint."""
    table = pa.table({"prompt_id": pa.array(images, pa.string()), COLUMN: pa.array(images.values(), IMAGES)})
    return write_table(directory / FILE, table)


def read_images(directory: Path, facts: Mapping[str, Any]) -> dict[str, Encoded] | None:
    """The images of prompts that rollouts with these facts were sampled from, by prompt_id; None if they saw none.

    Raises UserError if they are not what was written.
    """
    if COLUMN not in facts:
        return None
    table, content = read_table(directory / FILE)
    if content != facts[COLUMN]:
        raise UserError(f"{directory / FILE}: not the images that the rollouts were sampled from; {RESTORE}")
    return images_of(table)


def with_images(rows: Rows, column: str | None, root: Path, watched: Sequence[Path]) -> Rows:
    """`rows` with `column` turned into `images`, list<large_binary>: bytes as given, null for a row without images.

    A cell is an image or a list of images, each as bytes, as a struct of bytes and path, or as a path below `root`,
    which must be in one of `watched`. A table without the column is left as it is. Raises UserError that names source
    and row for what is not an image.
    """
    table = rows.table
    if column is None:
        _refuse_unmarked(rows)
        _tell_unseen(rows)
    if column != COLUMN and column in table.column_names and COLUMN in table.column_names:
        raise UserError(
            f"{rows.source}: prompts.images_column is {column}, but there is a column {COLUMN} too, which it would "
            "take the place of; rename or drop one"
        )
    if column is None or column not in table.column_names:
        return rows

    def read(index: int, cell: pa.Scalar) -> list[bytes] | None:
        return _read_cell(cell.as_py(), root, watched, rows.place(index, column))

    with ThreadPoolExecutor() as pool:  # Pillow decodes outside the interpreter's lock.
        cells = list(pool.map(read, range(table.num_rows), table[column]))
    return replace(rows, table=table.drop_columns([column]).append_column(COLUMN, pa.array(cells, IMAGES)))


def check_images(table: pa.Table, column: str | None, source: str) -> None:
    """Raise UserError if none of the datasets that `table` was put together from has the column of images."""
    if column is not None and not has_images(table):
        raise UserError(
            f"{source}: no column {column}; there are {', '.join(table.column_names)}; set prompts.images_column to "
            "one of them (null cells are rows without images)"
        )


def decode(image: bytes) -> "Image":
    """The decoded image; raises UserError if it is not one of FORMATS or broken."""
    from PIL import Image, UnidentifiedImageError

    try:
        opened = open_image(image)
        opened.load()
    except (UnidentifiedImageError, Image.DecompressionBombError, OSError, SyntaxError, ValueError) as error:
        told = "of no format that is read" if isinstance(error, UnidentifiedImageError) else str(error)
        raise UserError(f"not an image ({told}); the formats are {', '.join(FORMATS)}") from error
    return opened


def open_image(image: bytes) -> "Image":
    """The image, decoded when its pixels are asked for; upright, as `datasets` decodes photos that a camera turned."""
    from PIL import Image, ImageOps

    opened = Image.open(BytesIO(image), formats=FORMATS)
    turned = "exif" in opened.info and opened.getexif().get(ORIENTATION, 1) != 1
    return ImageOps.exif_transpose(opened) if turned else opened


def as_seen(rows: pa.Table) -> dict[str, list[Any]]:
    """`prompts` and `images` of rows with images as TRL gives them to reward functions: opened images, also within.

    Nothing for rows of a policy that sees no images.
    """
    if not has_images(rows):
        return {}
    images = [[open_image(image) for image in cell or ()] for cell in rows[COLUMN].to_pylist()]
    pairs = zip(rows["prompt"].to_pylist(), images, strict=True)
    prompts = [with_parts(messages, [{"image": image} for image in some]) for messages, some in pairs]
    return {"prompts": prompts, COLUMN: images}


def with_parts(messages: Sequence[dict[str, str]], images: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages in the form of vision-language chat templates, the images before the text of the first user message.

    As TRL's prepare_multimodal_messages; what `images` holds stands in the parts of type image. Raises UserError if
    there are images and no user message.
    """
    left, made = [{"type": "image", **image} for image in images], []
    for message in messages:
        content: list[dict[str, Any]] = [{"type": "text", "text": message["content"]}]
        if message["role"] == "user":
            content, left = left + content, []
        made.append({**message, "content": content})
    if left:
        raise UserError("has images, but no user message to put them in; add one")
    return made


def _is_made(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) and pa.types.is_large_binary(kind.value_type))


def _refuse_unmarked(rows: Rows) -> None:
    """The type tells later stages that the policy sees images, so a column for rewards alone must not have it."""
    if has_images(rows.table):
        raise UserError(
            f"{rows.source}: column {COLUMN} holds lists of large_binary; set prompts.images_column to {COLUMN} if the "
            "policy is to see them, else rename the column"
        )


def _tell_unseen(rows: Rows) -> None:
    for name in sorted({"image", COLUMN} & set(rows.table.column_names)):  # what TRL would show to the policy
        say(f"{rows.source}: the policy does not see column {name}; set prompts.images_column: {name} if it is to")


def _read_cell(cell: Any, root: Path, watched: Sequence[Path], where: str) -> list[bytes] | None:
    if cell is None:
        return None
    items = cell if isinstance(cell, list) else [cell]
    read = [_read(item, root, watched, f"{where}, image {number}") for number, item in enumerate(items, 1)]
    return read or None


def _read(item: Any, root: Path, watched: Sequence[Path], where: str) -> bytes:
    if isinstance(item, dict):
        item = item.get("bytes") or item.get("path")
    if isinstance(item, str):
        item = _from_file(item, root, watched, where)
    if not isinstance(item, bytes):
        raise UserError(
            f"{where}: expected bytes, a struct of bytes and path, or a path, found {type(item).__name__}; mend or "
            "remove the row"
        )
    try:
        decode(item)
    except UserError as error:
        raise UserError(f"{where}: {error}; mend or remove the row") from error
    return item


def _from_file(path: str, root: Path, watched: Sequence[Path], where: str) -> bytes:
    try:
        read = (root / path).read_bytes()
    except (OSError, ValueError) as error:
        raise UserError(
            f"{where}: {path[:200]!r} could not be read ({type(error).__name__}); paths are taken from the project's "
            "folder, and nothing is fetched from the network"
        ) from error
    target = (root / path).resolve()
    if not any((root / place).resolve() in (target, *target.parents) for place in watched):
        folder = Path(path).parent
        raise UserError(
            f"{where}: {path[:200]} is in nothing that `sources` lists, so an edit of it would rerun nothing; add to "
            f"params.yaml under sources:\n  images: {{path: {folder}, used_by: prompts}}"
        )
    return read
