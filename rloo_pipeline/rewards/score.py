"""Rewards of completions: components scored one after another over all shards, then combined."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rloo_pipeline.config import ExecutionConfig, RewardConfig
from rloo_pipeline.errors import UserError
from rloo_pipeline.progress import progress
from rloo_pipeline.reward_config import FunctionReward, JudgeReward, ModelReward
from rloo_pipeline.rewards.call import TrainerState
from rloo_pipeline.rewards.combine import combine, extras, reasons
from rloo_pipeline.rewards.functions import open_functions
from rloo_pipeline.rewards.kept import Kept, Shards
from rloo_pipeline.rewards.scored import Score, Scored, applies_to, as_stored, place, settle, spread
from rloo_pipeline.schema import KEY_NAMES, rewards_schema
from rloo_pipeline.shards import Entry, write_shards

Finish = Callable[[int, pa.Table], pa.Table]


def join_prompts(rollouts: pa.Table, prompts: pa.Table) -> pa.Table:
    """`rollouts` with the columns of `prompts` beside them, joined by prompt_id; UserError if a prompt is missing."""
    index = pc.index_in(rollouts["prompt_id"], value_set=prompts["prompt_id"].combine_chunks())
    if index.null_count:
        missing = rollouts["prompt_id"].filter(index.is_null())[0].as_py()
        raise UserError(
            f"prompt_id {missing}: its completions are in the rollouts, but it is not among the prompts; run prepare "
            "and rollouts again"
        )
    columns = [name for name in prompts.column_names if name != "prompt_id"]
    beside = prompts.select(columns).take(index)
    for name in columns:
        rollouts = rollouts.append_column(beside.schema.field(name), beside[name])
    return rollouts


def score_shards(
    configs: Sequence[RewardConfig],
    shards: Shards,
    work: Path,
    root: Path,
    state: TrainerState,
    execution: ExecutionConfig,
    *,
    finish: Finish = lambda index, rewards: rewards,
    schema: pa.Schema | None = None,
) -> list[Entry]:
    """Write the rewards (schema.rewards_schema) of every shard to `work`; `finish` makes the artifact's table of them.

    All functions are scored first, then each other component over all shards, so that one model at a time is in
    memory and each is loaded once. The scores of all but the last stand beside `work`, so a killed stage goes on at
    the first missing (component, shard). Raises UserError for a component that cannot be opened or that fails.
    """
    schema = schema or rewards_schema([config.name for config in configs])
    *earlier, last = parts(configs)
    kept = Kept(work)
    for number, part in enumerate(earlier):
        with scorer(part, shards.count, root, state, execution) as score:
            kept.write(number, part, shards, score)
    with scorer(last, shards.count, root, state, execution) as score:

        def make(index: int) -> pa.Table:
            rows = shards.rows(index)
            scored = kept.read(earlier, index) | score(rows)
            kept.note(index, scored)
            return finish(index, rewards_table(configs, rows, scored)).select(schema.names)

        return write_shards(work, shards.count, make, schema)


def parts(configs: Sequence[RewardConfig]) -> list[list[RewardConfig]]:
    """The components in the order of scoring; those in one list are scored together."""
    functions: list[RewardConfig] = [config for config in configs if isinstance(config, FunctionReward)]
    others: list[list[RewardConfig]] = [[config] for config in configs if not isinstance(config, FunctionReward)]
    return [functions, *others] if functions else others


@contextmanager
def scorer(
    part: Sequence[RewardConfig], shards: int, root: Path, state: TrainerState, execution: ExecutionConfig
) -> Iterator[Score]:
    """What scores each of the shards by the components of one part: settled, as float32 holds them.

    A model is loaded, or a process started, when the first rows come: not at all if every shard is there already.
    """
    names = ", ".join(config.name for config in part)
    with ExitStack() as stack, progress(f"scoring, {names}", shards, "shards") as done:
        opened: list[Score] = []

        def score(rows: pa.Table) -> dict[str, Scored]:
            if not opened:
                opened.append(stack.enter_context(_open(part, root, state, execution)))
            scored = {name: as_stored(found) for name, found in opened[0](rows).items()}
            settled = {config.name: settle(config, rows, scored[config.name]) for config in part}
            done.advance()
            return settled

        yield score


@contextmanager
def _open(part: Sequence[RewardConfig], root: Path, state: TrainerState, execution: ExecutionConfig) -> Iterator[Score]:
    functions = [config for config in part if isinstance(config, FunctionReward)]
    if functions:
        with open_functions(functions, root, state, execution) as score:
            yield score
        return
    (config,) = part
    with _open_other(config, root, execution) as score_rows:

        def routed(rows: pa.Table) -> dict[str, Scored]:
            which = applies_to(config, rows)
            given = rows if which is None else rows.take(pa.array(which, pa.int64()))
            found = score_rows(given) if given.num_rows else Scored(np.empty(0))
            return {config.name: spread(found, which, rows.num_rows)}

        yield routed


def _open_other(
    config: RewardConfig, root: Path, execution: ExecutionConfig
) -> AbstractContextManager[Callable[[pa.Table], Scored]]:
    if isinstance(config, ModelReward):
        from rloo_pipeline.rewards.model import open_model

        return open_model(config, root, execution)
    if isinstance(config, JudgeReward):
        from rloo_pipeline.rewards.judge import open_judge

        return open_judge(config, root, execution)
    assert not isinstance(config, FunctionReward)
    from rloo_pipeline.rewards.service import open_service

    return open_service(config, execution)


def rewards_table(configs: Sequence[RewardConfig], rows: pa.Table, scored: Mapping[str, Scored]) -> pa.Table:
    """The rewards (schema.rewards_schema) of `rows`; raises UserError for a sum that float32 cannot hold."""
    reward_N = combine(configs, scored)
    with np.errstate(over="ignore"):
        stored_N = reward_N.astype(np.float32)
    too_large = np.flatnonzero(np.isinf(stored_N))
    if too_large.size:
        row = int(too_large[0])
        raise UserError(
            f"rewards: the weighted sum of {place(rows, row)} is {reward_N[row]:g}, which float32 cannot hold; lower "
            "the weights, or give the component a clip"
        )
    columns = [rows[name] for name in KEY_NAMES]
    columns += [_nullable(scored[config.name].scores_N) for config in configs]
    columns += [_nullable(stored_N), pa.array(reasons(configs, scored, reward_N), pa.string())]
    columns.append(pa.array(extras(configs, scored, rows.num_rows), pa.string()))
    return pa.Table.from_arrays(columns, schema=rewards_schema([config.name for config in configs]))


def _nullable(values_N: npt.NDArray[np.floating]) -> pa.Array:
    return pa.array(values_N.astype(np.float32), pa.float32(), from_pandas=True)
