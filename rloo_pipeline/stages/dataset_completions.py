"""The dataset's own completions of held-out prompts, scored like sampled ones: something to compare a policy with."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from rloo_pipeline.config import EvaluateConfig, RewardConfig
from rloo_pipeline.errors import UserError
from rloo_pipeline.layout import INITIAL
from rloo_pipeline.manifest import read_manifest
from rloo_pipeline.policy.handle import Policy
from rloo_pipeline.policy.load import load_tokenizer
from rloo_pipeline.rewards.call import TrainerState
from rloo_pipeline.rewards.kept import Shards
from rloo_pipeline.rewards.score import join_prompts, score_shards
from rloo_pipeline.schema import COMPLETION, DATASET_REWARD, KEYS
from rloo_pipeline.shards import read_shards, read_table
from rloo_pipeline.stages.context import Context
from rloo_pipeline.stages.sampling import Prompts

WHERE = "evaluate.opponent_column"
NOT_SAMPLED = ("sampler_logprobs", "finish_reason", "seed", "policy_fingerprint")
COLUMNS = pa.schema([pa.field(name, kind) for name, kind, _, _ in (*KEYS, *COMPLETION) if name not in NOT_SAMPLED])


def dataset_rewards(
    context: Context,
    config: EvaluateConfig,
    rewards: Sequence[RewardConfig],
    held_out: pa.Table,
    prompts: Prompts,
    policy: Policy,
    work: Path,
) -> pa.Table | None:
    """prompt_id and dataset_reward (float32, null: not valid) of each prompt with a completion in opponent_column.

    They are scored once, with the initial policy's evaluation, which later iterations read. None if there is no such
    column to compare with; raises UserError if the column cannot be used.
    """
    if config.opponent_column is None:
        return None
    found = texts_of(held_out, config.opponent_column)
    texts = {prompt_id: found[prompt_id] for prompt_id in prompts.ids if prompt_id in found}
    if not texts:
        raise UserError(
            f"{WHERE}: no held-out prompt has a completion in column {config.opponent_column}; name another"
        )
    if context.iteration != INITIAL:
        return _of_initial(context, config.opponent_column, list(texts))
    own = completions(texts, prompts, policy)
    size = config.prompts_per_shard
    shards = Shards(-(-own.num_rows // size), lambda index: join_prompts(own.slice(index * size, size), held_out))
    state = TrainerState(context.number)
    try:
        entries = score_shards(rewards, shards, work, context.layout.root, state, context.execution)
    except UserError as error:
        raise UserError(f"{WHERE}: the dataset's own completions cannot be scored: {error}") from error
    scored = pa.concat_tables([read_table(work / file)[0] for file, _, _ in entries])
    return scored.select(["prompt_id", "reward"]).rename_columns(["prompt_id", DATASET_REWARD])


def texts_of(held_out: pa.Table, column: str) -> dict[str, str]:
    """The dataset's completion of each prompt that has one, by prompt_id; raises UserError for an unusable column."""
    if column not in held_out.column_names:
        raise UserError(
            f"{WHERE}: the held-out prompts have no column {column}, but {', '.join(held_out.column_names)}"
        )
    cells = held_out[column]
    if pa.types.is_list(cells.type) or pa.types.is_large_list(cells.type):
        cells = _content(cells)
    if not (pa.types.is_string(cells.type) or pa.types.is_large_string(cells.type)):
        raise UserError(
            f"{WHERE}: column {column} is of type {cells.type}; a completion is a string, or a list of one message "
            "with role and content"
        )
    pairs = zip(held_out["prompt_id"].to_pylist(), cells.to_pylist(), strict=True)
    return {prompt_id: text for prompt_id, text in pairs if text is not None}


def _content(cells: pa.ChunkedArray) -> pa.ChunkedArray:
    """The contents of lists of one message each, as conversational datasets have completions; others as they are."""
    kind = cells.type.value_type
    single = pc.all(pc.equal(pc.list_value_length(cells), 1), min_count=0).as_py()
    if not (single and pa.types.is_struct(kind) and kind.get_field_index("content") >= 0):
        return cells
    return pc.struct_field(pc.list_element(cells, 0), "content")


def completions(texts: Mapping[str, str], prompts: Prompts, policy: Policy) -> pa.Table:
    """A row for each prompt_id in `texts`, as if its text and an EOS had been sampled."""
    rows = [row for row, prompt_id in enumerate(prompts.ids) if prompt_id in texts]
    tokenizer = load_tokenizer(policy.model, policy.trust_remote_code)
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    ids = tokenizer(list(texts.values()), add_special_tokens=False, verbose=False)["input_ids"]
    columns = {
        "iteration": [int(INITIAL)] * len(rows),
        "prompt_id": [prompts.ids[row] for row in rows],
        "sample_index": [0] * len(rows),
        "prompt_text": [prompts.texts[row] for row in rows],
        "prompt_token_ids": [prompts.token_ids[row] for row in rows],
        "completion_text": list(texts.values()),
        "completion_token_ids": [[*row, *end] for row in ids],
    }
    return pa.table(columns, schema=COLUMNS)


def _of_initial(context: Context, column: str, prompt_ids: Sequence[str]) -> pa.Table:
    evaluation = context.layout.evaluation(INITIAL)
    scored = read_manifest(evaluation)["facts"].get("opponent_column")
    if scored != column:
        raise UserError(
            f"{evaluation}: made with evaluate.opponent_column {scored or 'null'}, not {column}; run `dvc repro "
            "evaluate_initial` again"
        )
    table = read_shards(evaluation)
    wanted = pc.and_(pc.equal(table["sample_index"], 0), pc.is_in(table["prompt_id"], value_set=pa.array(prompt_ids)))
    return table.filter(wanted).select(["prompt_id", DATASET_REWARD])


def beside(table: pa.Table, found: pa.Table | None) -> pa.Array:
    """The dataset_reward of each row of `table` by its prompt, null where there is none."""
    if found is None:
        return pa.nulls(table.num_rows, pa.float32())
    index = pc.index_in(table["prompt_id"], value_set=found["prompt_id"].combine_chunks())
    return found[DATASET_REWARD].combine_chunks().take(index.combine_chunks())
