"""What a vision-language policy is given beside token ids: the processor's part of rendering and of every pass."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from rloo_pipeline.data.images import Encoded, decode, images_of, with_parts
from rloo_pipeline.data.prompts import is_conversational
from rloo_pipeline.data.template import render, render_chat
from rloo_pipeline.errors import UserError
from rloo_pipeline.policy.handle import Policy
from rloo_pipeline.policy.load import load_config, load_tokenizer
from rloo_pipeline.progress import progress

if TYPE_CHECKING:
    import torch

    from rloo_pipeline.policy.batches import Batch

Read = Callable[[pa.Table], tuple[list[str], list[list[int]]]]
PLACEHOLDERS = ("image_token_id", "video_token_id", "audio_token_id")  # of a model's configuration


class Vision:
    """A vision-language policy's processor.

    placeholders: ids that stand for images and the like. A sampled one would be taken for an image that is not there,
    so sampler, policy and reference give them probability 0.
    """

    def __init__(self, processor: Any, placeholders: Sequence[int], name: str) -> None:
        self.processor, self.placeholders, self.name = processor, tuple(placeholders), name
        defaults = getattr(getattr(processor, "valid_processor_kwargs", None), "_defaults", {})
        self._token_types = bool(defaults.get("text_kwargs", {}).get("return_mm_token_type_ids"))
        self._settings = {**defaults.get("images_kwargs", {}), "do_convert_rgb": True}
        self._compared = False

    def render(
        self, prompts: Sequence[Sequence[dict[str, str]]], images_P: Sequence[Encoded]
    ) -> tuple[list[str], list[list[int]]]:
        """Text, with one placeholder for each image, and token ids, with all of them, of each prompt."""
        messages = []
        for row, (prompt, images) in enumerate(zip(prompts, images_P, strict=True), start=1):
            try:
                messages.append(with_parts(prompt, [{}] * len(images)))
            except UserError as error:
                raise UserError(f"prompt {row} {error}") from error
        texts = render_chat(messages, self.processor, add_generation_prompt=True)
        ids = []
        with progress("reading prompts with images", len(texts), "prompts") as done:
            for row, (text, images) in enumerate(zip(texts, images_P, strict=True), start=1):
                ids.append(self._ids(row, text, images))
                done.advance()
        return texts, ids

    def unexpanded(self, text: str) -> list[int]:
        """The token ids of a rendered text with one placeholder for each image."""
        ids: list[int] = self.processor.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def inputs(
        self, images_B: Sequence[Encoded], input_ids_BL: "torch.Tensor", model: Any
    ) -> dict[str, "torch.Tensor"]:
        """What the model takes beside ids and mask for rows with these images, on its device and in its precision.

        Only the image processor runs: the ids are those that were sampled from, never made anew.
        """
        import torch

        given: dict[str, torch.Tensor] = self._pixels(images_B)
        known = inspect.signature(model.base_model.forward).parameters
        if self._token_types:
            name = "mm_token_type_ids" if "mm_token_type_ids" in known else "token_type_ids"
            given[name] = torch.tensor(self.processor.create_mm_token_type_ids(input_ids_BL.tolist()))
        return {
            name: value.to(model.device, model.dtype if value.is_floating_point() else None)
            for name, value in given.items()
        }

    def _pixels(self, images_B: Sequence[Encoded]) -> dict[str, Any]:
        decoded = [[decode(image) for image in images] for images in images_B if images]
        if not decoded:
            return {}
        processor = self.processor.image_processor
        made = processor(decoded, return_tensors="pt", **self._settings)
        unused = getattr(self.processor, "unused_input_names", ())
        return {name: made[name] for name in processor.model_input_names if name in made and name not in unused}

    def _ids(self, row: int, text: str, images: Encoded) -> list[int]:
        token = getattr(self.processor, "image_token", None)
        if token is not None and text.count(token) != len(images):
            raise UserError(
                f"prompt {row} ({text[:200]!r}) holds {text.count(token)} times {token} for {len(images)} images; its "
                f"messages must not hold it, and the chat template of {self.name} must write it once for each image"
            )
        pictures = {"images": [[decode(image) for image in images]]} if images else {}
        settings = {"do_convert_rgb": True} if images else {}
        try:
            made = self.processor(text=[text], **pictures, **settings, add_special_tokens=False, return_tensors="pt")
        except (ValueError, IndexError, KeyError, TypeError) as error:
            raise UserError(
                f"prompt {row} ({text[:200]!r}): the processor of {self.name} refuses it with {len(images)} images "
                f"({error}); change its text or images"
            ) from error
        ids: list[int] = made["input_ids"][0].tolist()
        if not images and not set(ids).isdisjoint(self.placeholders):
            raise UserError(
                f"prompt {row} ({text[:200]!r}) holds a placeholder of an image, but has no images; change its text"
            )
        if images and not self._compared:
            self._compare(made, images)
        return ids

    def _compare(self, made: Mapping[str, Any], images: Encoded) -> None:
        """Raise UserError if the processor gives other inputs with text than its image processor gives alone."""
        alone = self._pixels([images])
        whole = {name: made[name] for name in made if name not in ("input_ids", "attention_mask")}
        others = [name for name in whole if name not in (*alone, "mm_token_type_ids", "token_type_ids")]
        if others or any(name not in whole or not np.array_equal(whole[name], alone[name]) for name in alone):
            raise UserError(
                f"{self.name}: its processor gives other inputs for images with text ({', '.join(sorted(whole))}) than "
                f"for images alone ({', '.join(sorted(alone))}), which is not known here; use another policy.model"
            )
        self._compared = True


def load_vision(model: Path, trust_remote_code: bool = False) -> Vision:
    """The processor in a model's directory; raises UserError if the model is not a vision-language model."""
    from transformers import AutoProcessor
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

    config = load_config(model, trust_remote_code)
    own_code = trust_remote_code and "AutoModelForImageTextToText" in getattr(config, "auto_map", {})
    if type(config) not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and not own_code:
        raise UserError(
            f"prompts.images_column is set, but the policy ({config.model_type}) is no vision-language model; use one, "
            "or leave images_column out"
        )
    known = None if own_code else PROCESSOR_MAPPING.get(type(config), None)
    chosen = AutoProcessor if known is None else for_images(known)
    try:
        # Always by Pillow, since torchvision resizes to other numbers and is not everywhere.
        processor = chosen.from_pretrained(
            model, trust_remote_code=trust_remote_code, local_files_only=True, backend="pil"
        )
    except (OSError, ValueError, ImportError, TypeError) as error:
        raise UserError(f"{model}: no processor could be loaded from it: {error}") from error
    if processor.chat_template is None:
        processor.chat_template = processor.tokenizer.chat_template
    return Vision(processor, placeholder_ids(config), config.model_type)


def placeholder_ids(config: Any) -> list[int]:
    """The ids that stand for images, videos and sound in a model's input; UserError if one is that of the padding."""
    found = [getattr(config, name, None) for name in PLACEHOLDERS]
    if 0 in found:
        raise UserError(f"{config.model_type}: its placeholder of images has id 0, which is the padding's here")
    return [number for number in found if number is not None]


def for_images(processor: Any) -> Any:
    """The processor class without its processor of videos, which needs torchvision."""

    class ForImages(processor):  # type: ignore[misc]
        @classmethod
        def get_attributes(cls) -> list[str]:
            return [name for name in processor.get_attributes() if name != "video_processor"]

    return ForImages


@dataclass(frozen=True)
class RowImages:
    """The images of N rows of completions, and what makes inputs of them."""

    vision: Vision
    images_N: Sequence[Encoded]

    def __getitem__(self, rows_M: np.ndarray) -> "RowImages":
        return RowImages(self.vision, [self.images_N[row] for row in rows_M])

    def inputs(self, batch: "Batch", model: Any) -> dict[str, "torch.Tensor"]:
        """Inputs of the batch's rows beside ids and mask."""
        return self.vision.inputs([self.images_N[row] for row in batch.rows_B], batch.input_ids_BL, model)


def row_images(vision: Vision, images: Mapping[str, Encoded], table: pa.Table) -> RowImages:
    """The images of each row of completions, by its prompt_id."""
    return RowImages(vision, [images.get(prompt_id, ()) for prompt_id in table["prompt_id"].to_pylist()])


def open_vision(policy: Policy) -> Vision:
    """The processor of a policy."""
    return load_vision(policy.model, policy.trust_remote_code)


def reader(model: Path, trust_remote_code: bool, *, images: bool) -> Read:
    """Gives text and token ids of each prompt of a table, by the model's tokenizer or, with images, its processor."""
    if images:
        vision = load_vision(model, trust_remote_code)
        return lambda table: _render_with_images(vision, table)
    tokenizer = load_tokenizer(model, trust_remote_code)
    return lambda table: render(table["prompt"].to_pylist(), tokenizer)


def _render_with_images(vision: Vision, table: pa.Table) -> tuple[list[str], list[list[int]]]:
    images = images_of(table) or {}
    if not is_conversational(table["prompt"]):
        raise UserError(
            "the prompts are strings, but images go into messages; give the prompts as messages, or set "
            "prompts.system_prompt, which makes messages of them"
        )
    images_P = [images.get(prompt_id, ()) for prompt_id in table["prompt_id"].to_pylist()]
    return vision.render(table["prompt"].to_pylist(), images_P)
