"""The check of a whole project."""

import re

import pyarrow as pa

from rloo_pipeline.check import hub, machine, memory, project, prompts, reward_models, rewards, tokens
from rloo_pipeline.check.memory import Need
from rloo_pipeline.check.models import Kind, Model, examine
from rloo_pipeline.check.prompts import Read, Rendered
from rloo_pipeline.check.report import Report
from rloo_pipeline.config import Params, load_params
from rloo_pipeline.data.splits import Split, load_prompts
from rloo_pipeline.data.template import render
from rloo_pipeline.errors import UserError
from rloo_pipeline.layout import Layout
from rloo_pipeline.policy.images import reader
from rloo_pipeline.reward_config import JudgeReward, ModelReward

Tables = dict[Split, pa.Table]


def run(layout: Layout) -> int:
    """Print what is found; returns the exit status, 2 if there is an error. Nothing is written."""
    report = Report()
    project.tools(layout, report)
    params = _params(layout, report)
    if params is None:
        return report.conclude()
    project.graph(layout, params, report)
    project.sources(layout, params, report)
    with hub.asked_if_there(params, report):
        _look(layout, params, report)
    return report.conclude()


def _look(layout: Layout, params: Params, report: Report) -> None:
    device, engine = machine.device(report), machine.engine(params, report)
    policy = _policy(layout, params, report)
    tables = _tables(layout, params, report)
    rendered = _rendered(tables, policy, params, report)
    trained = [reward_models.look_at(*item, layout, report) for item in params.reward_models.items()]
    needs = [need for need in trained if need is not None] + _rewards(tables, rendered, layout, params, report)
    if policy is not None:
        longest = max((int(item.lengths_P.max()) for item in rendered.values()), default=0)
        needs = [*memory.needs(params, policy.parameters, policy.text, longest, engine, device.is_gpu), *needs]
        project.disk(layout, params, policy.parameters, report)
    machine.memory(needs, device, report)
    _cost(tables, rendered, params, report)


def _params(layout: Layout, report: Report) -> Params | None:
    try:
        params = load_params(layout.params)
    except UserError as error:
        name = f"{layout.params}: "
        for finding in re.split(f"^{re.escape(name)}", str(error), flags=re.MULTILINE):
            if finding:
                report.error("params.yaml", finding.rstrip("\n"))
        return None
    names = ", ".join(reward.name for reward in params.rewards)
    report.ok("params.yaml", f"{len(params.iterations)} iterations, rewards {names}")
    project.rewritable(layout, params, report)
    return params


def _policy(layout: Layout, params: Params, report: Report) -> Model | None:
    config, where = params.policy, "policy.model"
    kind: Kind = "AutoModelForCausalLM" if params.prompts.images_column is None else "AutoModelForImageTextToText"
    trusted = config.trust_remote_code
    found = examine(where, config.model, config.revision, layout.root, kind, report, trust_remote_code=trusted)
    if found is None:
        return None
    size, template = f"{found.parameters / 1e6:.1f} M parameters", "a" if found.tokenizer.chat_template else "no"
    report.ok(where, f"{config.model}: {size}, context {found.context}, {template} chat template")
    if found.context is None:
        report.error(where, f"{config.model}: max_position_embeddings is missing, so its context is not known")
        return None
    return found


def _tables(layout: Layout, params: Params, report: Report) -> Tables:
    try:
        loaded = load_prompts(params.prompts, layout.root, params.seed, params.sources)
    except UserError as error:
        # A hub that cannot be asked now may be there when the project runs.
        report.tell("warning" if isinstance(error.__cause__, ConnectionError) else "error", "prompts", str(error))
        return {}
    tables = {split: item.table for split, item in loaded.items()}
    prompts.contents(tables, params, report)
    return tables


def _rendered(tables: Tables, policy: Model | None, params: Params, report: Report) -> dict[Split, Rendered]:
    """The prompts as the policy sees them, with what is to be said of their lengths and number."""
    found: dict[Split, Rendered] = {}
    if policy is None or policy.context is None:
        return found
    read = _read(policy, params, report)
    for split, table in tables.items():
        rendered = None if read is None else prompts.render(split, table, read, report)
        if rendered is None:
            continue
        config = params.rollouts if split == "train" else params.evaluate
        found[split], kept = prompts.lengths(split, table, rendered, policy.context, config, params, report)
        if split == "train":
            prompts.twice_begun(rendered, policy.tokenizer.bos_token_id, report)
            prompts.enough(kept, params, report)
    return found


def _read(policy: Model, params: Params, report: Report) -> Read | None:
    if params.prompts.images_column is None:
        return lambda table: render(table["prompt"].to_pylist(), policy.tokenizer)
    return report.attempt("policy.model", reader, policy.directory, params.policy.trust_remote_code, images=True)


def _rewards(
    tables: Tables, rendered: dict[Split, Rendered], layout: Layout, params: Params, report: Report
) -> list[Need]:
    """Call or look at every reward; returns what their models take."""
    needs = []
    seen = {split: tables[split].take(pa.array(item.rows_P)) for split, item in rendered.items()}
    for config in params.rewards:
        if isinstance(config, ModelReward | JudgeReward):
            rows = {split: rewards.longest(config, table, rendered[split]) for split, table in seen.items()}
            found = rewards.model(config, rows, layout, params, report)
            if found is not None:
                needs.append(memory.of_weights(f"rewards, {config.name}", found.parameters, config.dtype))
        elif "train" in seen:
            rewards.dry_call(config, rewards.made_up(config, seen["train"], rendered["train"]), layout, params, report)
        else:
            report.warning(f"rewards, {config.name}", "not called: that takes prompts and the policy's tokenizer")
    return needs


def _cost(tables: Tables, rendered: dict[Split, Rendered], params: Params, report: Report) -> None:
    if set(rendered) != {"train", "eval"}:
        return
    mean = {split: float(item.lengths_P.mean()) for split, item in rendered.items()}
    one = tokens.iteration(params, mean["train"])
    evaluated = tokens.evaluation(params, tables["eval"].num_rows, mean["eval"])
    report.ok("cost, an iteration", str(one))
    report.ok("cost, an evaluation", str(evaluated))
    report.ok("cost, the whole chain", str(tokens.chain(params, one, evaluated)))
