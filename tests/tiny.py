"""A random tiny Llama with a byte-level tokenizer: real code paths in milliseconds."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast, ProcessorMixin

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|im_start|>", "<|im_end|>"]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes and two special tokens; <|im_end|> (id 1) is both EOS and pad."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator([], trainers.BpeTrainer(special_tokens=SPECIAL, initial_alphabet=alphabet))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def make_model(seed: int = 0, *, context: int = 256, **overrides: object) -> LlamaForCausalLM:
    """Two layers, hidden size 64, vocabulary 258, tied embeddings, wide initial weights so that it has opinions."""
    settings: dict[str, object] = {
        "vocab_size": 258,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": context,
        "initializer_range": 0.2,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": 1,
        "pad_token_id": 1,
    }
    config = LlamaConfig(**(settings | overrides))
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config)
    torch.random.set_rng_state(state)
    return model.eval()


def make_policy(directory: Path, seed: int = 0, **overrides: object) -> Path:
    """Save the tiny model and its tokenizer in `directory`."""
    make_model(seed, **overrides).save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)
    return directory


IMAGE_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}[<image>]{% else %}{{ part['text'] }}{% endif %}{% endfor %}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_TEXT = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
_SIGHT = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


def make_vlm(kind: str, seed: int = 0, side: int = 28) -> tuple[PreTrainedModel, ProcessorMixin]:
    """A tiny random vision-language model with its processor: llava, idefics3, qwen2_vl or gemma3.

    They batch images in three ways: one row for each (llava, gemma3), [rows, most images of a row], and all patches
    behind each other. The last two tell the kinds of tokens too; gemma3 sees an image's own tokens in both directions.
    """
    tokenizer = make_tokenizer()
    names = ["<|image_pad|>", "<|video_pad|>"] if kind == "qwen2_vl" else ["<image>", "<video>"]
    special = [*names, "<fake_token_around_image>", "<end_of_utterance>", "<global-img>"]
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    image, video = tokenizer.convert_tokens_to_ids(names)
    text = _TEXT | {
        "vocab_size": len(tokenizer),
        "max_position_embeddings": 256,
        "initializer_range": 0.2,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": 1,
        "pad_token_id": 1,
    }
    sight = _SIGHT | {"image_size": side, "patch_size": 14, "initializer_range": 0.5}
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    build = {"llava": _llava, "idefics3": _idefics3, "qwen2_vl": _qwen2_vl, "gemma3": _gemma3}[kind]
    model, processor = build(text, sight, tokenizer, image, video)
    torch.random.set_rng_state(state)
    processor.chat_template = IMAGE_TEMPLATE.replace("<image>", names[0])
    return model.eval(), processor


def _llava(
    text: dict[str, Any], sight: dict[str, Any], tokenizer: PreTrainedTokenizerFast, image: int, video: int
) -> tuple[PreTrainedModel, ProcessorMixin]:
    from transformers import CLIPVisionConfig, LlavaConfig, LlavaForConditionalGeneration, LlavaProcessor
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**sight, projection_dim=16),
        text_config=LlamaConfig(**text),
        image_token_id=image,
        vision_feature_layer=-1,
        tie_word_embeddings=True,
    )
    side = {"height": sight["image_size"], "width": sight["image_size"]}
    images = CLIPImageProcessorPil(size=side, crop_size=side)
    processor = LlavaProcessor(
        images, tokenizer, patch_size=14, vision_feature_select_strategy="default", num_additional_image_tokens=1
    )
    return LlavaForConditionalGeneration(config), processor


def _idefics3(
    text: dict[str, Any], sight: dict[str, Any], tokenizer: PreTrainedTokenizerFast, image: int, video: int
) -> tuple[PreTrainedModel, ProcessorMixin]:
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration, Idefics3Processor
    from transformers.models.idefics3.configuration_idefics3 import Idefics3VisionConfig
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    config = Idefics3Config(
        vision_config=Idefics3VisionConfig(**sight),
        text_config=LlamaConfig(**text),
        image_token_id=image,
        scale_factor=2,
        tie_word_embeddings=True,
        pad_token_id=1,
    )
    side = {"longest_edge": sight["image_size"]}
    images = Idefics3ImageProcessorPil(size=side, max_image_size=side, do_image_splitting=False)
    return Idefics3ForConditionalGeneration(config), Idefics3Processor(images, tokenizer, image_seq_len=1)


def _qwen2_vl(
    text: dict[str, Any], sight: dict[str, Any], tokenizer: PreTrainedTokenizerFast, image: int, video: int
) -> tuple[PreTrainedModel, ProcessorMixin]:
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration, Qwen2VLProcessor
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    from rloo_pipeline.policy.images import for_images

    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
    config = Qwen2VLConfig(
        text_config=text | {"num_key_value_heads": 1, "rope_parameters": rope},
        vision_config={"depth": 1, "embed_dim": 16, "hidden_size": 64, "num_heads": 2, "patch_size": 14},
        image_token_id=image,
        video_token_id=video,
        tie_word_embeddings=True,
    )
    images = Qwen2VLImageProcessorPil(min_pixels=28 * 28, max_pixels=56 * 56)
    return Qwen2VLForConditionalGeneration(config), for_images(Qwen2VLProcessor)(images, tokenizer)


def _gemma3(
    text: dict[str, Any], sight: dict[str, Any], tokenizer: PreTrainedTokenizerFast, image: int, video: int
) -> tuple[PreTrainedModel, ProcessorMixin]:
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration, Gemma3Processor
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    from rloo_pipeline.policy.images import for_images

    named = {"boi_token": "<image>", "image_token": "<video>", "eoi_token": "<end_of_utterance>"}
    tokenizer._set_model_specific_special_tokens(named)
    config = Gemma3Config(
        text_config=text | {"num_key_value_heads": 1, "head_dim": 32, "sliding_window": 64, "initializer_range": 0.05},
        vision_config=sight,
        mm_tokens_per_image=4,
        image_token_id=video,
        boi_token_index=image,
        pad_token_id=1,
    )
    images = Gemma3ImageProcessorPil(size={"height": sight["image_size"], "width": sight["image_size"]})
    model = Gemma3ForConditionalGeneration(config)
    # The library starts it with zeros, through which no image is seen.
    torch.nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight, std=0.5)
    return model, for_images(Gemma3Processor)(images, tokenizer, image_seq_length=4)


def make_vlm_policy(directory: Path, kind: str = "llava", seed: int = 0) -> Path:
    """Save a tiny vision-language model and its processor in `directory`."""
    model, processor = make_vlm(kind, seed)
    model.save_pretrained(directory)
    processor.save_pretrained(directory)
    return directory
