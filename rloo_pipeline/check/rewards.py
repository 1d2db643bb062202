"""Whether the rewards can score: a call on two made-up completions, or what can be known of a model without weights."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rloo_pipeline.check.models import Kind, Model, examine
from rloo_pipeline.check.prompts import Rendered
from rloo_pipeline.check.report import Level, Report
from rloo_pipeline.config import ExecutionConfig, Params, RewardConfig
from rloo_pipeline.data.splits import Split
from rloo_pipeline.layout import Layout, reward_model_at
from rloo_pipeline.reward_config import FunctionReward, JudgeReward, ModelReward
from rloo_pipeline.rewards.call import TrainerState
from rloo_pipeline.rewards.judge import question_ids, token_id
from rloo_pipeline.rewards.loading import Ids
from rloo_pipeline.rewards.model import check_logit, token_ids
from rloo_pipeline.rewards.question import questions
from rloo_pipeline.rewards.score import join_prompts, scorer
from rloo_pipeline.rewards.scored import Scored
from rloo_pipeline.stages.sampling import COLUMNS

COMPLETIONS = ("The answer is 42.", "")  # the second as of a policy that ends at once
LONGEST_CALL = 60.0  # seconds
STOPPED = "and was stopped"  # how the reason of a call that took too long ends
EXECUTION = {"service_retries": 0}


def dry_call(config: RewardConfig, rows: pa.Table, layout: Layout, params: Params, report: Report) -> None:
    """Score the rows by the same path as the stage, but quickly: no retries, a minute at most."""
    where = f"rewards, {config.name}"
    limit = min(config.time_limit, LONGEST_CALL) if isinstance(config, FunctionReward) else None
    quick = {"on_error": "invalid", **({"time_limit": limit} if limit else {})}
    execution = params.execution.model_copy(update=EXECUTION)
    scored = report.attempt(where, _score, config.model_copy(update=quick), rows, layout.root, execution)
    if scored is None:
        return
    texts = rows["completion_text"].to_pylist()
    for reason in dict.fromkeys(scored.errors.values()):
        if isinstance(config, FunctionReward) and limit != config.time_limit and STOPPED in reason:
            report.warning(where, f"{reason}; the stage waits {config.time_limit:g} s, so it may be as it should")
            continue
        of = " and ".join(repr(texts[row]) for row in sorted(scored.errors) if scored.errors[row] == reason)
        report.tell(_level(config), where, f"{reason} (completion {of}, made up)")
    if not scored.errors:
        report.ok(where, f"scores of two made-up completions: {', '.join(_told(value) for value in scored.scores_N)}")


def _score(config: RewardConfig, rows: pa.Table, root: Path, execution: ExecutionConfig) -> Scored:
    with scorer([config], 1, root, TrainerState(0), execution) as score:
        return score(rows)[config.name]


def _told(value: float) -> str:
    return "none (does not apply)" if np.isnan(value) else f"{value:g}"


def made_up(config: RewardConfig, prompts: pa.Table, rendered: Rendered) -> pa.Table:
    """Two completions of the first two of `prompts`, rendered as said, that the reward applies to, joined with them."""
    rows = _applying(config, prompts)
    return _completed(prompts, rendered, [rows[0], rows[min(1, len(rows) - 1)]])


def longest(config: RewardConfig, prompts: pa.Table, rendered: Rendered) -> pa.Table:
    """The same of the longest of them."""
    rows = _applying(config, prompts)
    row = rows[int(np.argmax(rendered.lengths_P[rows]))]
    return _completed(prompts, rendered, [row, row])


def _applying(config: RewardConfig, prompts: pa.Table) -> list[int]:
    rows = list(range(prompts.num_rows))
    if config.tasks is not None and "task" in prompts.column_names:
        among = pc.is_in(prompts["task"].cast(pa.string()), value_set=pa.array(config.tasks))
        rows = np.flatnonzero(among.to_numpy(zero_copy_only=False)).tolist() or rows
    return rows


def _completed(prompts: pa.Table, rendered: Rendered, rows: list[int]) -> pa.Table:
    values: dict[str, Any] = {
        "iteration": [0, 0],
        "prompt_id": [prompts["prompt_id"][row].as_py() for row in rows],
        "sample_index": [0, 1],
        "prompt_text": [rendered.texts[row] for row in rows],
        "prompt_token_ids": [rendered.token_ids[row] for row in rows],
        "completion_text": list(COMPLETIONS),
        "completion_token_ids": [[0, 1, 2], [0]],
        "sampler_logprobs": [[-1.0, -1.0, -1.0], [-1.0]],
        "finish_reason": ["stop", "stop"],
        "seed": [0, 1],
        "policy_fingerprint": ["", ""],
    }
    return join_prompts(pa.table(values, schema=COLUMNS), prompts)


def model(
    config: ModelReward | JudgeReward, rows: dict[Split, pa.Table], layout: Layout, params: Params, report: Report
) -> Model | None:
    """What is known of a reward's model without its weights, and whether it could read the longest of the prompts."""
    where = f"rewards, {config.name}"
    name = config.model if isinstance(config, ModelReward) else config.judge
    kind: Kind = "AutoModelForSequenceClassification" if isinstance(config, ModelReward) else "AutoModelForCausalLM"
    trained = reward_model_at(Path(name))
    if trained in params.reward_models and not (layout.root / name).exists():
        report.ok(where, f"{name}: the stage reward_model trains it")
        return None
    found = examine(where, name, config.revision, layout.root, kind, report)
    if found is None:
        return None
    if isinstance(config, ModelReward):
        report.attempt(where, check_logit, config, found.config.num_labels, name)
    elif config.token is not None:
        report.attempt(where, token_id, config.token, found.tokenizer, name)
    for split, made in rows.items():
        given = _given(config, made, found, where, report, shown=split == "train")
        if given is None:
            break  # the other split would say the same
        _fits(config, split, len(given[COMPLETIONS.index("")]), found, params, report)
    report.ok(where, f"{name}: {found.parameters / 1e6:.1f} M parameters, context {found.context or 'unknown'}")
    return found


def _given(
    config: ModelReward | JudgeReward, rows: pa.Table, found: Model, where: str, report: Report, *, shown: bool
) -> list[Ids] | None:
    """The tokens that the model would be given for each row; None, with an error, if there are none."""
    if isinstance(config, ModelReward):
        return report.attempt(where, token_ids, rows, found.tokenizer)
    asked = report.attempt(where, questions, config.prompt, rows, config.judge)
    if asked is None:
        return None
    texts, errors = asked
    for reason in dict.fromkeys(errors.values()):
        report.tell(_level(config), where, reason)
    if shown:
        report.ok(where, f"what the judge is asked about a made-up completion\n{texts[0]}")
    return report.attempt(where, question_ids, texts, found.tokenizer)


def _fits(
    config: ModelReward | JudgeReward, split: Split, tokens: int, found: Model, params: Params, report: Report
) -> None:
    """Whether the longest prompt of a split, `tokens` with an empty completion, leaves the room for a whole one."""
    sampling, section = (params.rollouts, "rollouts") if split == "train" else (params.evaluate, "evaluate")
    answer = 0 if isinstance(config, ModelReward) else 1 if config.token is not None else config.max_tokens
    known = [length for length in (found.context, found.tokenizer.model_max_length) if length is not None]
    limit = min(known) - answer
    if tokens + sampling.max_tokens <= limit:
        return
    # Its tokens are not the policy's, so a whole completion can be longer or shorter than that.
    level = _level(config) if tokens > limit else "warning"
    report.tell(
        level,
        f"rewards, {config.name}",
        f"of the longest prompt looked at of prompts.{split} it reads {tokens} tokens, and of a completion about "
        f"{sampling.max_tokens} more at most, but it takes {limit}; lower prompts.max_prompt_tokens or "
        f"{section}.max_tokens, or take a model with a longer context",
    )


def _level(config: RewardConfig) -> Level:
    """How bad it is that a row cannot be scored."""
    return "error" if config.on_error == "fail" else "warning"
