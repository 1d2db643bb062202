"""What is run in processes of their own, since vLLM changes the one that it runs in: `python -m ... NAME IN OUT`."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rloo_pipeline.config import ExecutionConfig
from rloo_pipeline.engines import Engine, Request, Sample
from rloo_pipeline.engines.choose import open_engine, why_no_vllm
from rloo_pipeline.errors import UserError
from rloo_pipeline.policy.images import load_vision
from rloo_pipeline.seeds import derive
from tests.pictures import PICTURES, PROMPTS
from tests.sampling import Counter, add_sampling_defaults, ragged_requests, set_eos, set_tokenizer_eos
from tests.tiny import make_policy, make_tokenizer, make_vlm_policy

TINY = ragged_requests(13)
SHARED_PREFIX = [3 + index % 200 for index in range(150)]
PREFIXED = [Request([*SHARED_PREFIX, 50 + index // 4], 900 + index) for index in range(12)]
FREQUENCY_PROMPT = [17, 101, 42]
EOS = list(range(40, 80))


def tiny_engine(model: Path, *, max_tokens: int = 8, context: int = 200, seed: int = 7, images: bool = False) -> Engine:
    return open_engine(
        "vllm",
        model,
        max_model_len=context,
        max_tokens=max_tokens,
        temperature=0.7,
        dtype="float32",
        seed=seed,
        execution=ExecutionConfig(threads=2),
        images=images,
    )


def sample(model: Path, *batches: Sequence[Request], **settings: Any) -> list[list[Sample]]:
    """Open an engine, sample each batch in a call of its own, close it."""
    engine = tiny_engine(model, **settings)
    results = [engine.generate(batch, Counter()) for batch in batches]
    engine.close()
    return results


def first_process(work: Path) -> dict[str, Any]:
    """The tiny policy, twice in one engine and in many orders."""
    policy = make_policy(work / "first")
    engine = tiny_engine(policy)
    counter = Counter()
    found: dict[str, Any] = {
        "samples": engine.generate(TINY, counter),
        "counted": counter.done,
        "again": engine.generate(TINY, Counter()),
        "reversed": engine.generate(TINY[::-1], Counter())[::-1],
        "alone": [engine.generate([request], Counter())[0] for request in TINY[:4]],
        "twins": engine.generate([Request([5, 6, 7], seed) for seed in range(20)], Counter()),
        "settings": dict(engine.settings),
        "prefixes_before": engine.generate(PREFIXED[5:], Counter()),
        "after_others": engine.generate(PREFIXED, Counter()),
    }
    engine.close()
    return found


def second_process(work: Path) -> dict[str, Any]:
    """The same in another process and with another engine seed; then other policies after it."""
    samples, prefixed = sample(make_policy(work / "first"), TINY, PREFIXED, seed=8)
    found: dict[str, Any] = {"samples": samples, "first_in_engine": prefixed}
    [found["other_weights"]] = sample(make_policy(work / "other", seed=1), TINY)
    [found["defaults"]] = sample(add_sampling_defaults(make_policy(work / "defaults")), TINY)
    [found["endless"]] = sample(set_eos(make_policy(work / "endless"), None), TINY, max_tokens=12)
    found["tokenizer_eos"] = found["endless"][0].token_ids[5]
    [found["ended_by_tokenizer"]] = sample(
        set_tokenizer_eos(set_eos(make_policy(work / "tokenizer"), None), found["tokenizer_eos"]), TINY, max_tokens=12
    )
    [found["ended"]] = sample(set_eos(make_policy(work / "ended"), EOS), TINY, max_tokens=12)
    requests = [Request(FREQUENCY_PROMPT, derive(3, "frequencies", index)) for index in range(3000)]
    [found["frequencies"]] = sample(work / "endless", requests, max_tokens=2)
    return found


def refusal_with_an_unfinished_request(engine: Any) -> str | None:
    """What generating says while the engine's cache cannot be reset, since a request holds blocks of it."""
    engine.engine.add_request("left over", {"prompt_token_ids": [5, 6, 7]}, engine._parameters(1))
    engine.engine.step()
    try:
        engine.generate(TINY[:1], Counter())
    except RuntimeError as error:
        return str(error)
    return None


def third_process(work: Path) -> dict[str, Any]:
    """A tokenizer that puts BOS before what it encodes; a request that does not fit; an engine that does not start."""
    from tokenizers.processors import TemplateProcessing

    policy = make_policy(work / "bos")
    tokenizer = make_tokenizer()
    tokenizer.bos_token = "<|im_start|>"
    tokenizer._tokenizer.post_processor = TemplateProcessing("<|im_start|> $A", special_tokens=[("<|im_start|>", 0)])
    tokenizer.save_pretrained(policy)
    assert tokenizer("a")["input_ids"][0] == 0
    engine = tiny_engine(policy, context=32)
    found: dict[str, Any] = {
        "bos": engine.generate([Request([0, *r.prompt_token_ids], r.seed) for r in TINY], Counter())
    }
    counter = Counter()
    try:
        engine.generate([Request([5] * 24, 1), Request([5] * 25, 2)], counter)
    except UserError as error:
        found["too_long"] = str(error)
    found["generated_before_the_refusal"] = counter.done
    found["just_fits"] = engine.generate([Request([5] * 24, 1)], Counter())
    found["unfinished"] = refusal_with_an_unfinished_request(engine)
    engine.close()
    try:
        tiny_engine(policy, context=10_000)
    except UserError as error:
        found["context_too_large"] = str(error)
    return found | seen(work)


def seen(work: Path) -> dict[str, Any]:
    """What a tiny vision-language policy says of images, and what becomes of a prompt that vLLM reads otherwise."""
    policy = make_vlm_policy(work / "idefics3", "idefics3")
    vision = load_vision(policy)
    texts, ids = vision.render(PROMPTS, PICTURES)
    requests = [
        Request(ids[row], 10 * row + sample, PICTURES[row], texts[row]) for row in range(len(ids)) for sample in (0, 1)
    ]
    engine = tiny_engine(policy, images=True)
    found: dict[str, Any] = {"seen": engine.generate(requests, Counter())}
    try:
        engine.generate([Request([*ids[0], 5], 1, PICTURES[0], texts[0])], Counter())
    except UserError as error:
        found["read_otherwise"] = str(error)
    engine.close()
    return found


def smollm2(work: Path) -> dict[str, Any]:
    """Sums asked of SmolLM2-135M-Instruct, float32."""
    from rloo_pipeline.policy.load import load_tokenizer

    tokenizer = load_tokenizer(work / "smollm2")
    questions = [[{"role": "user", "content": f"What is {a} + {a * 7 % 10}? Explain it."}] for a in range(8)]
    prompts = [tokenizer.apply_chat_template(q, add_generation_prompt=True, return_dict=False) for q in questions]
    requests = [Request(prompts[index // 2], 40 + index) for index in range(16)]
    [samples] = sample(work / "smollm2", requests, max_tokens=24)
    return {"prompts": [list(request.prompt_token_ids) for request in requests], "samples": samples}


if __name__ == "__main__":
    name, work, out = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    reason = why_no_vllm()
    found = {"skip": f"no vllm: {reason}"} if reason else globals()[name](work)
    out.write_text(json.dumps(found, default=asdict))
