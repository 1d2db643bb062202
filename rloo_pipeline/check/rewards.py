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
from rloo_pipeline.layout import Layout, reward_model_at
from rloo_pipeline.reward_config import FunctionReward, JudgeReward, ModelReward
from rloo_pipeline.rewards.call import TrainerState
from rloo_pipeline.rewards.judge import token_id
from rloo_pipeline.rewards.model import check_logit, token_ids
from rloo_pipeline.rewards.question import questions
from rloo_pipeline.rewards.score import join_prompts, scorer
from rloo_pipeline.rewards.scored import Scored
from rloo_pipeline.stages.sampling import COLUMNS

COMPLETIONS = ("The answer is 42.", "")  # the second as of a policy that ends at once
LONGEST_CALL = 60.0  # seconds
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
    for row, reason in sorted(scored.errors.items()):
        level: Level = "error" if config.on_error == "fail" else "warning"
        report.tell(level, where, f"{reason} (completion {rows['completion_text'][row].as_py()!r}, made up)")
    if not scored.errors:
        report.ok(where, f"scores of two made-up completions: {', '.join(_told(value) for value in scored.scores_N)}")


def _score(config: RewardConfig, rows: pa.Table, root: Path, execution: ExecutionConfig) -> Scored:
    with scorer([config], 1, root, TrainerState(0), execution) as score:
        return score(rows)[config.name]


def _told(value: float) -> str:
    return "none (does not apply)" if np.isnan(value) else f"{value:g}"


def made_up(config: RewardConfig, prompts: pa.Table, rendered: Rendered) -> pa.Table:
    """Two completions of the first two of `prompts`, rendered as said, that the reward applies to, joined with them."""
    rows = list(range(prompts.num_rows))
    if config.tasks is not None and "task" in prompts.column_names:
        among = pc.is_in(prompts["task"].cast(pa.string()), value_set=pa.array(config.tasks))
        rows = np.flatnonzero(among.to_numpy(zero_copy_only=False)).tolist() or rows
    first, second = rows[0], rows[min(1, len(rows) - 1)]
    values: dict[str, Any] = {
        "iteration": [0, 0],
        "prompt_id": [prompts["prompt_id"][row].as_py() for row in (first, second)],
        "sample_index": [0, 1],
        "prompt_text": [rendered.texts[row] for row in (first, second)],
        "prompt_token_ids": [rendered.token_ids[row] for row in (first, second)],
        "completion_text": list(COMPLETIONS),
        "completion_token_ids": [[0, 1, 2], [0]],
        "sampler_logprobs": [[-1.0, -1.0, -1.0], [-1.0]],
        "finish_reason": ["stop", "stop"],
        "seed": [0, 1],
        "policy_fingerprint": ["", ""],
    }
    return join_prompts(pa.table(values, schema=COLUMNS), prompts)


def model(
    config: ModelReward | JudgeReward, rows: pa.Table | None, layout: Layout, params: Params, report: Report
) -> Model | None:
    """What is known of a reward's model without its weights, and whether it could read these completions."""
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
        if rows is not None:
            report.attempt(where, token_ids, rows, found.tokenizer)
    else:
        if config.token is not None:
            report.attempt(where, token_id, config.token, found.tokenizer, name)
        if rows is not None:
            _question(config, rows, where, report)
    report.ok(where, f"{name}: {found.parameters / 1e6:.1f} M parameters, context {found.context or 'unknown'}")
    return found


def _question(config: JudgeReward, rows: pa.Table, where: str, report: Report) -> None:
    asked = report.attempt(where, questions, config.prompt, rows, config.judge)
    if asked is None:
        return
    texts, errors = asked
    for reason in errors.values():
        report.tell("error" if config.on_error == "fail" else "warning", where, reason)
    report.ok(where, f"what the judge is asked about a made-up completion\n{texts[0]}")
