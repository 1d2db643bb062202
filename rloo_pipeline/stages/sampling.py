"""Sampling completions of prompts into shards: what rollouts and evaluate share."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from rloo_pipeline.config import SamplingConfig
from rloo_pipeline.data.filter import fits, prompt_limit
from rloo_pipeline.data.images import Encoded, has_images, images_of
from rloo_pipeline.engines import Engine, Request, Sample
from rloo_pipeline.engines.choose import choose_engine, open_engine
from rloo_pipeline.files import write_json
from rloo_pipeline.policy.batches import rows_of
from rloo_pipeline.policy.handle import Policy
from rloo_pipeline.policy.images import reader
from rloo_pipeline.policy.load import context_length, load_tokenizer
from rloo_pipeline.progress import progress, say
from rloo_pipeline.schema import COMPLETION, KEYS
from rloo_pipeline.seeds import derive
from rloo_pipeline.shards import Entry, write_shards
from rloo_pipeline.stages.context import Context, Record

ENGINES = "engines.json"
COLUMNS = pa.schema([pa.field(name, kind, nullable) for name, kind, nullable, _ in (*KEYS, *COMPLETION)])


@dataclass(frozen=True)
class Prompts:
    """P prompts as the policy sees them."""

    ids: list[str]
    texts: list[str]
    token_ids: list[list[int]]
    filtered: dict[str, str]  # why a prompt was left out, by its id
    images: Mapping[str, Encoded] | None = None  # encoded, by prompt id, for a policy that sees images

    def __len__(self) -> int:
        return len(self.ids)


def prepare_prompts(table: pa.Table, policy: Policy, max_tokens: int) -> Prompts:
    """Apply the chat template and leave out, with reasons, what does not fit the context with max_tokens to come."""
    read = reader(policy.model, policy.trust_remote_code, images=has_images(table))
    texts, token_ids = read(table)
    limit = prompt_limit(context_length(policy.model, policy.trust_remote_code), max_tokens)
    kept_P, reasons = fits([len(ids) for ids in token_ids], limit)
    ids = table["prompt_id"].to_pylist()
    filtered = {ids[row]: reason for row, reason in reasons.items()}
    tell_filtered(filtered, len(ids))
    rows = np.flatnonzero(kept_P).tolist()
    images = images_of(table.filter(pa.array(kept_P)))
    return Prompts([ids[i] for i in rows], [texts[i] for i in rows], [token_ids[i] for i in rows], filtered, images)


def tell_filtered(filtered: Mapping[str, str], prompts: int) -> None:
    """Say how many prompts are left out, with the first reasons."""
    if filtered:
        first = "; ".join(f"{prompt_id}: {reason}" for prompt_id, reason in list(filtered.items())[:3])
        say(f"{len(filtered)} of {prompts} prompts are left out ({first})")


class Sampler:
    """Samples n completions per prompt with an engine that starts when the first shard is missing."""

    def __init__(
        self, context: Context, policy: Policy, config: SamplingConfig, prompts: Prompts, n: int, purpose: Sequence[Any]
    ) -> None:
        self.context, self.policy, self.config, self.prompts = context, policy, config, prompts
        self.n, self.purpose = n, purpose
        self.engine: Engine | None = None
        self.seconds = 0.0  # in generation alone, without the engine's start
        self.engines: list[Any] = []  # settings of the engines that made the shards
        self.name, reason = choose_engine(config.engine, images=prompts.images is not None)
        say(f"engine {self.name}: {reason}")

    @property
    def shards(self) -> int:
        """How many shards the prompts make."""
        return -(-len(self.prompts) // self.config.prompts_per_shard)

    def write(self, work: Path, finish: Callable[[pa.Table], pa.Table], schema: pa.Schema) -> list[Entry]:
        """Sample every missing shard; `finish` turns the sampled columns into the artifact's.

        The engine's settings stand beside `work`, since the process that finishes may be another one.
        """
        noted = work.with_name(ENGINES)
        self.engines = json.loads(noted.read_text(encoding="utf-8")) if noted.exists() else []

        def make(index: int) -> pa.Table:
            settings = dict(self._open().settings)
            if settings not in self.engines:
                self.engines.append(settings)
                write_json(noted, self.engines)
            return finish(self._shard(index))

        try:
            return write_shards(work, self.shards, make, schema)
        finally:
            self.close()

    def close(self) -> None:
        """Give the engine's memory back."""
        if self.engine is not None:
            self.engine.close()
            self.engine = None

    def _open(self) -> Engine:
        if self.engine is None:
            longest = max(len(ids) for ids in self.prompts.token_ids)
            self.engine = open_engine(
                self.name,
                self.policy.model,
                max_model_len=longest + self.config.max_tokens,
                max_tokens=self.config.max_tokens,
                temperature=self.config.temperature,
                dtype=self.config.dtype,
                seed=derive(self.context.seed, "engine") % 2**31,
                execution=self.context.execution,
                trust_remote_code=self.policy.trust_remote_code,
                images=self.prompts.images is not None,
            )
            self.policy.check_unchanged()
        return self.engine

    def _shard(self, index: int) -> pa.Table:
        size = self.config.prompts_per_shard
        chosen = range(index * size, min((index + 1) * size, len(self.prompts)))
        keys = [(self.prompts.ids[p], sample) for p in chosen for sample in range(self.n)]
        owners = [p for p in chosen for _ in range(self.n)]
        seeds = [derive(self.context.seed, *self.purpose, prompt_id, sample) for prompt_id, sample in keys]
        images = self.prompts.images or {}
        requests = [
            Request(self.prompts.token_ids[p], seed, images.get(self.prompts.ids[p], ()), self.prompts.texts[p])
            for p, seed in zip(owners, seeds, strict=True)
        ]
        engine = self._open()
        with progress(f"generating, shard {index + 1} of {self.shards}", len(requests), "completions") as done:
            started = time.monotonic()
            samples = engine.generate(requests, done)
            self.seconds += time.monotonic() - started
        self.policy.check_unchanged()
        return self._table(keys, owners, seeds, samples)

    def _table(
        self, keys: list[tuple[str, int]], owners: list[int], seeds: list[int], samples: list[Sample]
    ) -> pa.Table:
        tokenizer = load_tokenizer(self.policy.model, self.policy.trust_remote_code)
        ids = [list(sample.token_ids) for sample in samples]
        columns = {
            "iteration": [self.context.number] * len(keys),
            "prompt_id": [prompt_id for prompt_id, _ in keys],
            "sample_index": [sample for _, sample in keys],
            "prompt_text": [self.prompts.texts[p] for p in owners],
            "prompt_token_ids": [self.prompts.token_ids[p] for p in owners],
            "completion_text": tokenizer.batch_decode(ids, skip_special_tokens=True),
            "completion_token_ids": ids,
            "sampler_logprobs": [list(sample.logprobs) for sample in samples],
            "finish_reason": [sample.finish_reason for sample in samples],
            "seed": seeds,
            "policy_fingerprint": [self.policy.fingerprint] * len(keys),
        }
        return pa.table(columns, schema=COLUMNS)


def describe(record: Record, table: pa.Table, sampler: Sampler) -> None:
    """Put the counts and lengths of the completions into the metrics, the engine's settings into the provenance."""
    lengths = table["completion_token_ids"].combine_chunks().value_lengths().to_numpy()
    # By ids, since other ids may decode to the same text.
    rows = zip(table["prompt_id"].to_pylist(), rows_of(table, "completion_token_ids"), strict=True)
    different = len({(prompt_id, ids.tobytes()) for prompt_id, ids in rows})
    record.metrics |= {
        "prompts": len(sampler.prompts),
        "prompts_filtered": len(sampler.prompts.filtered),
        "completions": table.num_rows,
        "completions/mean_length": float(lengths.mean()),
        "completions/min_length": int(lengths.min()),
        "completions/max_length": int(lengths.max()),
        "completions/clipped_ratio": float((table["finish_reason"].to_numpy() == "length").mean()),
        "completions/duplicate_ratio": 1 - different / table.num_rows,
    }
    record.timings["tokens"] = float(lengths.sum())
    if sampler.seconds:
        record.timings["tokens_per_second"] = float(lengths.sum()) / sampler.seconds
    engines = sampler.engines
    record.notes |= {"filtered": sampler.prompts.filtered, "engine": engines[0] if len(engines) == 1 else engines}
