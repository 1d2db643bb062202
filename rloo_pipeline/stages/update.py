"""Update: the policy's optimizer steps on the iteration's completions, by default one strictly on-policy step."""

import shutil
import time
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from rloo_pipeline import fingerprint
from rloo_pipeline.data.images import read_images
from rloo_pipeline.disk import check_space, refusals_told
from rloo_pipeline.errors import UserError
from rloo_pipeline.guard import check_advantages, check_on_policy, check_rows_on_policy, names_of
from rloo_pipeline.manifest import read_manifest, write_model_manifest
from rloo_pipeline.objective.advantages import INVALID
from rloo_pipeline.objective_config import UpdateConfig
from rloo_pipeline.policy import trainer_state
from rloo_pipeline.policy.batches import rows_of
from rloo_pipeline.policy.handle import Policy, open_policy
from rloo_pipeline.policy.images import RowImages, open_vision, row_images
from rloo_pipeline.policy.load import load_model, pass_conditions
from rloo_pipeline.policy.logprobs import check_head
from rloo_pipeline.policy.step import KlTerm, Rows, make_optimizer
from rloo_pipeline.progress import say
from rloo_pipeline.shards import read_shards
from rloo_pipeline.stages.advantages import join
from rloo_pipeline.stages.context import Context, Record, start
from rloo_pipeline.stages.optimize import Learner, optimize

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def run(context: Context, config: UpdateConfig) -> None:
    """Step on the trained rows, write policy and trainer state; raises UserError on rows of another policy.

    Without any row to train on, the policy is written as it is, and no step counted.
    """
    layout, iteration = context.layout, context.iteration
    policy = open_policy(layout.model(context.link.previous))
    check_space(layout, policy.model, 1)
    state = layout.trainer_state(context.link.previous)
    rollouts, advantages = read_manifest(layout.rollouts(iteration)), read_manifest(layout.advantages(iteration))
    check_on_policy(rollouts["facts"]["policy_fingerprint"], policy.fingerprint, iteration, context.link.previous)
    check_advantages(layout, iteration, advantages["facts"], rollouts["fingerprint"])
    inputs = {
        "policy": policy.fingerprint,
        "trainer_state": trainer_state.checked_state(state, policy.fingerprint),
        "rollouts": rollouts["fingerprint"],
        "advantages": advantages["fingerprint"],
    }
    kl = _kl_term(advantages["facts"])
    if kl is not None:
        inputs["logprobs"] = read_manifest(layout.logprobs(iteration))["fingerprint"]
    record = start(context, "update", config, inputs)

    logprobs_table = None if kl is None else read_shards(layout.logprobs(iteration))
    advantages_table = read_shards(layout.advantages(iteration))
    rollouts_table = read_shards(layout.rollouts(iteration))
    check_rows_on_policy(rollouts_table, policy.fingerprint, iteration, context.link.previous)
    images = read_images(layout.rollouts(iteration), rollouts["facts"])
    seen = None if images is None else partial(row_images, open_vision(policy), images)
    rows = trained_rows(rollouts_table, advantages_table, logprobs_table, seen)
    shutil.rmtree(record.work.parent, ignore_errors=True)
    carried = advantages["facts"].get("carried")
    if len(rows):
        _learn(record, policy, rows, config, kl, rollouts["facts"], carried)
    else:
        _keep(record, policy, advantages_table, carried)

    work = record.work
    written = write_model_manifest(work / "model", trust_remote_code=policy.trust_remote_code)
    state_written = write_model_manifest(work / "trainer_state", policy_fingerprint=written)
    outputs = {
        work / "trainer_state": layout.trainer_state(iteration),
        work / "model": layout.model(iteration),
    }
    record.finish(outputs, fingerprint.of_json([written, state_written]))


def _learn(
    record: Record,
    policy: Policy,
    rows: Rows,
    config: UpdateConfig,
    kl: KlTerm | None,
    sampling: Mapping[str, Any],
    carried: Mapping[str, Any] | None,
) -> None:
    """Take the optimizer's steps and write model and trainer state into the work in progress.

    sampling: the facts of the rollouts' manifest.
    """
    context, execution = record.context, record.context.execution
    model = _trainable(policy, execution.gradient_checkpointing, images=rows.images_N is not None)
    parameters = dict(model.named_parameters())
    optimizer = make_optimizer(parameters, config)
    step = trainer_state.restore(optimizer, parameters, context.layout.trainer_state(context.link.previous))
    budget = execution.update_microbatch_tokens
    learner = Learner(model, optimizer, config, sampling["temperature"], budget, kl, sampling.get("dtype", "float32"))
    started = time.monotonic()
    record.metrics |= optimize(learner, rows, step, context.seed, context.iteration)
    policy.check_unchanged()
    _describe(record, rows, time.monotonic() - started)
    record.notes["execution"] = pass_conditions(
        update_microbatch_tokens=budget, gradient_checkpointing=execution.gradient_checkpointing
    )
    _save_policy(model, policy, record.work / "model")
    count = int(record.metrics["step"])
    trainer_state.save(optimizer, parameters, record.work / "trainer_state", count, carried)


def _keep(record: Record, policy: Policy, advantages: pa.Table, carried: Mapping[str, Any] | None) -> None:
    """Write policy and moments as they are, with what advantages hand on; raises UserError if no reward is valid.

    An iteration of groups without signal is no fault, and the next one draws other prompts; one without any valid
    reward comes from a reward that is broken.
    """
    context = record.context
    told = advantages["exclusion_reason"].to_pylist()
    reasons = Counter(INVALID if reason.startswith(INVALID) else reason for reason in told)
    if set(reasons) == {INVALID}:
        raise UserError(
            f"no completion of iteration {context.iteration} has a valid reward, so there is nothing to train on; the "
            "column reward_error of its rewards says why"
        )
    counts = "; ".join(f"{count}: {reason}" for reason, count in reasons.most_common())
    say(
        f"warning: update {context.iteration}: no completion is trained on ({counts}), so no optimizer step is taken "
        f"and policy {context.iteration} is policy {context.link.previous} unchanged"
    )
    manifest = shutil.ignore_patterns(fingerprint.MANIFEST)
    shutil.copytree(policy.model, record.work / "model", ignore=manifest, copy_function=shutil.copyfile)
    previous = context.layout.trainer_state(context.link.previous)
    step = trainer_state.keep(previous, record.work / "trainer_state", carried)
    nothing = dict.fromkeys(("loss", "grad_norm", "completions", "completion_tokens"), 0.0)
    record.metrics |= {**nothing, "step": step, "skipped": 1}


def trained_rows(
    rollouts: pa.Table,
    advantages: pa.Table,
    logprobs: pa.Table | None = None,
    seen: Callable[[pa.Table], RowImages] | None = None,
) -> Rows:
    """The rows that count in the loss, joined by key, with the reference's log-probs of `logprobs` if it is given.

    seen: gives the images of a table's rows, if the policy is given any.
    """
    table = join(rollouts, advantages)
    if logprobs is not None:
        table = join(table, logprobs)
    table = table.filter(table["trained"])
    return Rows(
        rows_of(table, "prompt_token_ids"),
        rows_of(table, "completion_token_ids"),
        rows_of(table, "sampler_logprobs"),
        table["advantage"].to_numpy(),
        reference_logprobs_N=None if logprobs is None else rows_of(table, "reference_logprobs"),
        names_N=names_of(table),
        images_N=None if seen is None else seen(table),
    )


def _kl_term(facts: Mapping[str, Any]) -> KlTerm | None:
    return KlTerm(**facts["kl_in_loss"]) if "kl_in_loss" in facts else None


def _trainable(policy: Policy, checkpointing: bool, *, images: bool) -> "PreTrainedModel":
    model = load_model(policy.model, "float32", trust_remote_code=policy.trust_remote_code, images=images)
    policy.check_unchanged()
    check_head(model)
    if checkpointing:
        # Dropout rates are 0, so training mode only lets the layers recompute their activations.
        model.train()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def _describe(record: Record, rows: Rows, seconds: float) -> None:
    tokens = int(rows.lengths_N.sum())
    record.metrics |= {"completions": len(rows), "completion_tokens": tokens, "skipped": 0}
    record.timings["tokens"] = float(tokens + sum(len(row) for row in rows.prompts_N))
    record.timings["tokens_per_second"] = record.timings["tokens"] / seconds


def _save_policy(model: "PreTrainedModel", previous: Policy, target: Path) -> None:
    """Weights by save_pretrained; configuration, tokenizer and chat template are the previous policy's, to the byte."""
    with refusals_told(target):
        model.save_pretrained(target)
    for path in previous.model.iterdir():
        if path.suffix != ".safetensors" and path.name not in (fingerprint.MANIFEST, "model.safetensors.index.json"):
            shutil.copyfile(path, target / path.name)
