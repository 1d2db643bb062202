from collections import Counter

import pyarrow as pa
import pytest

from rloo_pipeline.config import ExecutionConfig, IterationConfig, RolloutsConfig
from rloo_pipeline.errors import UserError
from rloo_pipeline.layout import Layout
from rloo_pipeline.manifest import write_model_manifest
from rloo_pipeline.policy.handle import open_policy
from rloo_pipeline.schema import ROLLOUTS
from rloo_pipeline.shards import read_table
from rloo_pipeline.stages.context import Context, Record
from rloo_pipeline.stages.sampling import COLUMNS, Prompts, Sampler, describe, prepare_prompts
from tests.enumeration import one_thread
from tests.tiny import make_policy, make_tokenizer


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    with one_thread():
        yield


def policy_in(directory, **settings):
    make_policy(directory, **settings)
    write_model_manifest(directory, trust_remote_code=False)
    return open_policy(directory)


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return policy_in(tmp_path_factory.mktemp("policy"))


def prompts_table(texts):
    return pa.table({"prompt_id": [f"p{row}" for row in range(len(texts))], "prompt": texts})


def test_too_long(tmp_path, capsys):
    """A context of 16 with 4 tokens to sample: prompts of 8, 16 and 20 bytes."""
    policy = policy_in(tmp_path, context=16)
    prompts = prepare_prompts(prompts_table(["x" * 8, "x" * 16, "x" * 20]), policy, 4)
    assert (prompts.ids, prompts.texts, len(prompts)) == (["p0"], ["x" * 8], 1)
    assert [len(ids) for ids in prompts.token_ids] == [8]
    assert set(prompts.filtered) == {"p1", "p2"}
    assert "too long: 16 tokens, a context of 16 leaves 12" in prompts.filtered["p1"]
    assert "too long: 20 tokens" in prompts.filtered["p2"]
    assert "2 of 3 prompts are left out (p1: too long" in capsys.readouterr().err
    with pytest.raises(UserError, match="none of 2 prompts is short enough"):
        prepare_prompts(prompts_table(["x" * 16, "x" * 20]), policy, 4)


def sample(root, policy, *, number=1, seed=0, per_shard=64, texts=("a", "b", "c"), samples=3, temperature=1.0):
    config = RolloutsConfig(
        engine="transformers", max_tokens=5, temperature=temperature, prompts_per_shard=per_shard,
        completions_per_prompt=samples, prompts_per_iteration=len(texts),
    )  # fmt: skip
    link = IterationConfig(previous="0000", reference="0000")
    context = Context(Layout(root), f"{number:04d}", link, seed, ExecutionConfig(threads=1))
    prompts = prepare_prompts(prompts_table(list(texts)), policy, config.max_tokens)
    sampler = Sampler(context, policy, config, prompts, samples, ("rollouts", context.iteration))
    entries = sampler.write(root, lambda table: table, ROLLOUTS)
    return sampler, pa.concat_tables(read_table(root / file)[0].replace_schema_metadata(None) for file, _, _ in entries)


def test_the_rows_of_every_group(tmp_path, policy):
    sampler, table = sample(tmp_path, policy)
    assert sampler.engine is None
    assert table["prompt_id"].to_pylist() == ["p0"] * 3 + ["p1"] * 3 + ["p2"] * 3
    assert table["sample_index"].to_pylist() == [0, 1, 2] * 3
    assert set(table["iteration"].to_pylist()) == {1}
    assert set(table["policy_fingerprint"].to_pylist()) == {policy.fingerprint}
    tokenizer = make_tokenizer()
    for row in table.to_pylist():
        assert row["prompt_token_ids"] == tokenizer.encode(row["prompt_text"])
        assert len(row["sampler_logprobs"]) == len(row["completion_token_ids"]) <= 5
        assert row["completion_text"] == tokenizer.decode(row["completion_token_ids"], skip_special_tokens=True)
        assert (row["finish_reason"] == "stop") == (row["completion_token_ids"][-1] == tokenizer.eos_token_id)


def test_seed_twins(tmp_path, policy):
    runs = [
        sample(tmp_path / str(index), policy, number=number, seed=seed)[1]
        for index, (number, seed) in enumerate([(1, 0), (2, 0), (1, 1), (1, 0)])
    ]
    seeds = [value for table in runs[:3] for value in table["seed"].to_pylist()]
    assert len(set(seeds)) == 27
    completions = Counter(tuple(ids) for table in runs[:3] for ids in table["completion_token_ids"].to_pylist())
    assert len(completions) > 24
    assert runs[3] == runs[0]


def test_the_size_of_shards_changes_no_completion(tmp_path, policy):
    _, whole = sample(tmp_path / "whole", policy)
    sampler, parts = sample(tmp_path / "parts", policy, per_shard=2)
    assert sampler.shards == 2
    for name in ("prompt_id", "sample_index", "seed", "completion_token_ids"):
        assert parts[name].to_pylist() == whole[name].to_pylist()


def test_a_prompts_completions_do_not_depend_on_the_others(tmp_path, policy):
    _, table = sample(tmp_path / "three", policy)
    _, alone = sample(tmp_path / "alone", policy, texts=("a",))
    assert alone["completion_token_ids"].to_pylist() == table["completion_token_ids"].to_pylist()[:3]


def test_finished_shards_are_kept_and_need_no_engine(tmp_path, policy, capsys):
    _, first = sample(tmp_path, policy, per_shard=1)
    (tmp_path / "shard-00001.parquet").unlink()
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("*.parquet")}
    capsys.readouterr()
    _, again = sample(tmp_path, policy, per_shard=1)
    assert again == first
    told = capsys.readouterr().err
    assert told.count("is there from an interrupted run: kept") == 2
    assert told.count("generating, shard 2 of 3") == 1
    assert "generating, shard 1" not in told
    assert {name: (tmp_path / name).stat().st_mtime_ns for name in before} == before


def test_the_engine_is_closed_when_a_shard_fails(tmp_path, policy):
    sampler, _ = sample(tmp_path / "first", policy)

    def fail(_table):
        raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        sampler.write(tmp_path / "second", fail, ROLLOUTS)
    assert sampler.engine is None


def test_metrics_by_hand(tmp_path, policy):
    sampler, _ = sample(tmp_path, policy)
    sampler.prompts = Prompts(["p0", "p1"], ["a", "b"], [[3], [4]], {"p2": "too long"})
    # The texts of p1 are equal, its ids are not; those of p0 are equal to the end.
    rows = [("p0", "x", [5, 1], "stop"), ("p0", "x", [5, 1], "stop"), ("p1", "x", [5, 6, 7, 8, 9], "length"),
            ("p1", "x", [6, 7, 1], "stop")]  # fmt: skip
    table = pa.table(
        {
            "prompt_id": [row[0] for row in rows],
            "completion_text": [row[1] for row in rows],
            "completion_token_ids": [row[2] for row in rows],
            "finish_reason": [row[3] for row in rows],
        }
    )
    record = Record(sampler.context, "rollouts", {}, {})
    describe(record, table, sampler)
    assert record.metrics == {
        "prompts": 2,
        "prompts_filtered": 1,
        "completions": 4,
        "completions/mean_length": 3.0,
        "completions/min_length": 2,
        "completions/max_length": 5,
        "completions/clipped_ratio": 0.25,
        "completions/duplicate_ratio": 0.25,
    }
    assert record.timings["tokens"] == 12
    assert record.notes["filtered"] == {"p2": "too long"}


def test_columns_are_those_of_rollouts():
    assert COLUMNS.equals(ROLLOUTS, check_metadata=False)
