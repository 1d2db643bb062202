"""All baselines side by side on the stored completions of one iteration, for every K up to the one at hand."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from rloo_pipeline.errors import UserError
from rloo_pipeline.files import write_json
from rloo_pipeline.layout import Layout
from rloo_pipeline.manifest import read_manifest
from rloo_pipeline.objective.advantages import Advantages
from rloo_pipeline.objective.baselines import BASELINES, RunningMean
from rloo_pipeline.objective.gradient_variance import gradient_moments, subsample
from rloo_pipeline.objective_config import AdvantagesConfig
from rloo_pipeline.policy.batches import collate, rows_of
from rloo_pipeline.policy.handle import Policy, open_policy
from rloo_pipeline.policy.load import load_model
from rloo_pipeline.policy.logprobs import check_head, score_batch
from rloo_pipeline.progress import progress, say
from rloo_pipeline.seeds import derive
from rloo_pipeline.shards import read_shards
from rloo_pipeline.stages.advantages import estimate, join, scored, scored_fingerprints
from rloo_pipeline.stages.context import Context
from rloo_pipeline.stages.estimator_state import State
from rloo_pipeline.stages.update import check_on_policy

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

BUCKETS = 2**14  # an inner product is off by 1.1% of the norms (one standard deviation)
SUBSETS = 32  # random choices of K completions a group that a figure is averaged over
Row = dict[str, Any]


@dataclass(frozen=True)
class Scored:
    """What an iteration's estimators are computed from, in key order."""

    table: pa.Table
    names_G: Sequence[str]
    facts: Mapping[str, Any]  # of the rollouts
    state: State

    @property
    def groups_N(self) -> np.ndarray:
        """Group index of each row."""
        return np.unique(self.table["prompt_id"].to_numpy(), return_inverse=True)[1]


def run(context: Context, config: AdvantagesConfig, earlier: Sequence[str]) -> None:
    """Print the comparison and write it as JSON and as a plot; raises UserError on rollouts of another policy.

    earlier: the iterations before this one, whose rewards the moving average is over.
    """
    layout, iteration, previous = context.layout, context.iteration, context.link.previous
    rollouts = read_manifest(layout.rollouts(iteration))
    policy = open_policy(layout.model(previous))
    check_on_policy(rollouts["facts"]["policy_fingerprint"], policy.fingerprint, iteration, previous)
    scored_fingerprints(layout, iteration, rollouts["fingerprint"])
    state = replace(State.read(layout.trainer_state(previous), config), past=past_rewards(layout, earlier))
    stored = Scored(*scored(layout, iteration), rollouts["facts"], state)
    check_groups(stored, iteration)

    seed = derive(context.seed, "estimators", iteration)
    tokens = join(
        stored.table.select(["iteration", "prompt_id", "sample_index"]), read_shards(layout.rollouts(iteration))
    )
    gram_NN = gram_matrix(policy, tokens, rollouts["facts"]["temperature"], seed % 2**31, BUCKETS)
    rows = compare(stored, gram_NN, config, seed % 2**31)
    path = layout.report("estimators", iteration, "json")
    write_json(path, {"iteration": iteration, "backward_passes": len(gram_NN), "buckets": BUCKETS, "estimators": rows})
    plot(rows, path.with_suffix(".png"))
    show(rows, f"Estimators on iteration {iteration}: {len(stored.names_G)} prompts")
    say(f"{path} and {path.with_suffix('.png').name} written; {len(gram_NN)} backward passes, one a completion")


def past_rewards(layout: Layout, earlier: Sequence[str]) -> RunningMean:
    """Mean of the penalized rewards of earlier iterations, whichever baseline they were trained with."""
    past = RunningMean()
    for iteration in earlier:
        table = read_shards(layout.advantages(iteration))
        past = past.including(table.filter(table["in_baseline"])["penalized_reward"].to_numpy())
    return past


def check_groups(stored: Scored, iteration: str) -> None:
    """Raise UserError if there are too few groups or completions to compare anything."""
    completions = stored.facts["completions_per_prompt"]
    if completions < 2 or len(stored.names_G) < 2:
        raise UserError(
            f"rollouts {iteration} have {len(stored.names_G)} prompts with {completions} completions each; variance "
            "between groups needs two prompts, and the baselines need two completions of each"
        )


def gram_matrix(policy: Policy, table: pa.Table, temperature: float, seed: int, buckets: int) -> np.ndarray:
    """Inner products of the gradients of the completions' log-probs, float64 [N, N], from sketches of the gradients.

    One backward pass per completion; memory beside the model: its gradient, 4 bytes per parameter for the sketch and
    8 * buckets bytes per completion.
    """
    from rloo_pipeline.objective.sketch import CountSketch

    model = load_model(policy.model, "float32", trust_remote_code=policy.trust_remote_code)
    check_head(model)
    parameters = list(model.parameters())
    sketch = CountSketch(parameters, buckets, seed)
    sketches_NB = np.empty((table.num_rows, buckets))
    with progress("gradients", table.num_rows, "completions") as done:
        for row, gradients in enumerate(_gradients(model, parameters, table, temperature)):
            sketches_NB[row] = sketch(gradients).cpu().numpy()
            done.advance(1)
    return sketches_NB @ sketches_NB.T


def _gradients(
    model: "PreTrainedModel", parameters: list["torch.nn.Parameter"], table: pa.Table, temperature: float
) -> Iterator[tuple["torch.Tensor", ...]]:
    """Of each completion's log-prob, in row order; 0 for parameters that text does not reach."""
    import torch

    prompts, completions = rows_of(table, "prompt_token_ids"), rows_of(table, "completion_token_ids")
    for row in range(table.num_rows):
        batch = collate(prompts, completions, np.array([row])).to(model.device)
        logprob = score_batch(model, batch, temperature).logprobs_BT.sum()
        yield torch.autograd.grad(logprob, parameters, allow_unused=True, materialize_grads=True)


def compare(stored: Scored, gram_NN: np.ndarray, config: AdvantagesConfig, seed: int) -> list[Row]:
    """A row of figures for each K from 2 to the one at hand and each baseline, by the other settings of `config`.

    Figures are means over SUBSETS random choices of K completions a group; at the whole K there is just one choice.
    """
    rows = []
    whole = stored.facts["completions_per_prompt"]
    for completions in range(2, whole + 1):
        seeds = range(seed, seed + (SUBSETS if completions < whole else 1))
        chosen = [subsample(stored.groups_N, completions, each) for each in seeds]
        figures = [_figures(stored, gram_NN, config, rows_M, completions) for rows_M in chosen]
        for name in BASELINES:
            means = {key: float(np.mean([figure[name][key] for figure in figures])) for key in figures[0][name]}
            rows.append({"completions_per_prompt": completions, "baseline": name, "subsets": len(chosen), **means})
    return rows


def _figures(
    stored: Scored, gram_NN: np.ndarray, config: AdvantagesConfig, rows_M: np.ndarray, completions: int
) -> dict[str, dict[str, float]]:
    """The figures of each baseline on these rows."""
    table = stored.table.take(pa.array(rows_M))
    facts = {**stored.facts, "completions_per_prompt": completions}
    groups_M, gram_MM = stored.groups_N[rows_M], gram_NN[np.ix_(rows_M, rows_M)]
    found = {
        name: estimate(
            table,
            stored.names_G,
            facts,
            config.model_copy(update={"baseline": name, "normalize": False}),
            stored.state,
        )
        for name in BASELINES
    }
    usual_M = found["leave_one_out"].advantage_N
    return {name: _of_one(computed, usual_M, groups_M, gram_MM) for name, computed in found.items()}


def _of_one(computed: Advantages, usual_M: np.ndarray, groups_M: np.ndarray, gram_MM: np.ndarray) -> dict[str, float]:
    trained_M, advantage_M = computed.trained_N, computed.advantage_N
    trained = advantage_M[trained_M] if trained_M.any() else np.zeros(1)
    compared_M = usual_M != 0
    agreeing = np.sign(advantage_M[compared_M]) == np.sign(usual_M[compared_M])
    moments = gradient_moments(gram_MM, advantage_M, trained_M, groups_M)
    return {
        "advantage_mean": float(trained.mean()),
        "advantage_variance": float(trained.var()),
        "zero_groups": 1 - len(np.unique(groups_M[advantage_M != 0])) / len(np.unique(groups_M)),
        "sign_agreement": float(agreeing.mean()) if compared_M.any() else 1.0,
        "gradient_squared_norm": moments.squared_norm,
        "gradient_variance": moments.variance,
        "relative_variance": moments.variance / moments.squared_norm if moments.squared_norm > 0 else 0.0,
    }


def show(rows: Sequence[Row], title: str) -> None:
    """Print the rows as a table."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, box=box.SIMPLE)
    columns = {
        "advantage_mean": ("A mean", ".3f"),
        "advantage_variance": ("A var", ".3g"),
        "zero_groups": ("zero", ".0%"),
        "sign_agreement": ("sign", ".0%"),
        "gradient_variance": ("grad var", ".3g"),
        "relative_variance": ("/ |G|²", ".3f"),
    }
    table.add_column("K", justify="right")
    table.add_column("baseline", no_wrap=True)
    for heading, _ in columns.values():
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        figures = [format(row[key], form) for key, (_, form) in columns.items()]
        table.add_row(str(row["completions_per_prompt"]), row["baseline"], *figures)
    Console().print(table)


def plot(rows: Sequence[Row], path: Path) -> None:
    """Draw variance against K, one line for each baseline, into a PNG file."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    panels = (
        ("gradient_variance", "gradient variance", "log"),
        ("relative_variance", "gradient variance / |G|²", "linear"),
    )
    for axes, (key, label, scale) in zip(figure.subplots(1, 2), panels, strict=True):
        for name in BASELINES:
            mine = [row for row in rows if row["baseline"] == name]
            axes.plot([row["completions_per_prompt"] for row in mine], [row[key] for row in mine], "o-", label=name)
        axes.set(xlabel="K, completions per prompt", ylabel=label, yscale=scale)
        axes.xaxis.get_major_locator().set_params(integer=True)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right upper", fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
