"""All baselines side by side on the stored completions of one iteration, for every K up to the one at hand."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from rloo_pipeline.data.images import Encoded, read_images
from rloo_pipeline.errors import UserError
from rloo_pipeline.files import write_json
from rloo_pipeline.guard import check_on_policy
from rloo_pipeline.layout import Layout
from rloo_pipeline.manifest import read_manifest
from rloo_pipeline.objective.advantages import Advantages
from rloo_pipeline.objective.baselines import BASELINES, RunningMean
from rloo_pipeline.objective.gradient_variance import GradientMoments, gradient_moments, relative_variance, subsample
from rloo_pipeline.objective.groups import SINGLE
from rloo_pipeline.objective_config import AdvantagesConfig
from rloo_pipeline.policy.batches import collate, rows_of
from rloo_pipeline.policy.handle import Policy, open_policy
from rloo_pipeline.policy.images import RowImages, open_vision, row_images
from rloo_pipeline.policy.load import load_model
from rloo_pipeline.policy.logprobs import check_head, score_batch
from rloo_pipeline.policy.trainer_state import checked_state
from rloo_pipeline.progress import progress, say
from rloo_pipeline.seeds import derive
from rloo_pipeline.shards import read_shards
from rloo_pipeline.stages.advantages import estimate, join, scored, scored_fingerprints
from rloo_pipeline.stages.context import Context
from rloo_pipeline.stages.estimator_state import State

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

BUCKETS = 2**14  # an inner product is off by 1.1% of the norms (one standard deviation)
SUBSETS = 512  # random choices of K completions a group that a figure is over: with fewer, |E G|^2 is mostly noise
OUTSIDE = (
    "The gradient compared is that of one on-policy step, divided by the number of completions: it knows nothing of "
    "update.loss_normalization, sampler_correction, the KL in the loss, clipping over several steps, "
    "advantages.normalize, max_grad_norm and the optimizer. Groups are taken as independent draws, though batch_mean "
    "and global_standardized couple them through the mean and deviation of the batch."
)
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
    checked_state(layout.trainer_state(previous), policy.fingerprint)
    state = replace(State.read(layout.trainer_state(previous), config), past=past_rewards(layout, earlier))
    stored = Scored(*scored(layout, iteration), rollouts["facts"], state)
    check_groups(stored, iteration)

    seed = derive(context.seed, "estimators", iteration)
    tokens = join(
        stored.table.select(["iteration", "prompt_id", "sample_index"]), read_shards(layout.rollouts(iteration))
    )
    started = time.monotonic()
    images = read_images(layout.rollouts(iteration), rollouts["facts"])
    gram_NN = gram_matrix(policy, tokens, rollouts["facts"]["temperature"], seed % 2**31, BUCKETS, images)
    seconds = time.monotonic() - started
    rows = compare(stored, gram_NN, config, seed % 2**31)
    path = layout.report("estimators", iteration, "json")
    write_json(path, {"iteration": iteration, "backward_passes": len(gram_NN), "buckets": BUCKETS, "estimators": rows})
    plot(rows, path.with_suffix(".png"))
    show(rows, f"Estimators on iteration {iteration}: {len(stored.names_G)} prompts")
    say(OUTSIDE)
    say(
        f"{path} and {path.with_suffix('.png').name} written; {len(gram_NN)} backward passes, one a completion, "
        f"in {seconds:.0f} s"
    )


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


def gram_matrix(
    policy: Policy,
    table: pa.Table,
    temperature: float,
    seed: int,
    buckets: int,
    images: Mapping[str, Encoded] | None = None,
) -> np.ndarray:
    """Inner products of the gradients of the completions' log-probs, float64 [N, N], from sketches of the gradients.

    One backward pass per completion; memory beside the model: its gradient, 4 bytes per parameter for the sketch and
    8 * buckets bytes per completion.
    """
    from rloo_pipeline.objective.sketch import CountSketch

    seen = None if images is None else row_images(open_vision(policy), images, table)
    model = load_model(policy.model, "float32", trust_remote_code=policy.trust_remote_code, images=seen is not None)
    check_head(model)
    parameters = list(model.parameters())
    sketch = CountSketch(parameters, buckets, seed)
    sketches_NB = np.empty((table.num_rows, buckets))
    with progress("gradients", table.num_rows, "completions") as done:
        for row, gradients in enumerate(_gradients(model, parameters, table, temperature, seen)):
            sketches_NB[row] = sketch(gradients).cpu().numpy()
            done.advance(1)
    return sketches_NB @ sketches_NB.T


def _gradients(
    model: "PreTrainedModel",
    parameters: list["torch.nn.Parameter"],
    table: pa.Table,
    temperature: float,
    seen: RowImages | None,
) -> Iterator[tuple["torch.Tensor", ...]]:
    """Of each completion's log-prob, in row order; 0 for parameters that text does not reach."""
    import torch

    prompts, completions = rows_of(table, "prompt_token_ids"), rows_of(table, "completion_token_ids")
    for row in range(table.num_rows):
        batch = collate(prompts, completions, np.array([row])).to(model.device)
        logprob = score_batch(model, batch, temperature, seen).logprobs_BT.sum()
        yield torch.autograd.grad(logprob, parameters, allow_unused=True, materialize_grads=True)


@dataclass(frozen=True)
class Sums:
    """What one choice of completions adds to a baseline's figures; ratios are taken over all choices at once."""

    trained: int  # rows
    advantage: float  # over trained rows
    squares: float  # of the trained rows' advantages about their mean
    groups: int
    zero_groups: int
    compared: int  # rows of which leave-one-out has a sign
    agreeing: int
    moments: GradientMoments


def compare(stored: Scored, gram_NN: np.ndarray, config: AdvantagesConfig, seed: int) -> list[Row]:
    """A row of figures for each K from 2 to the one at hand and each baseline, by the other settings of `config`.

    Figures are over SUBSETS random choices of K completions a group; at the whole K there is just one choice.
    """
    rows = []
    whole = stored.facts["completions_per_prompt"]
    for completions in range(2, whole + 1):
        seeds = range(seed, seed + (SUBSETS if completions < whole else 1))
        chosen = [subsample(stored.groups_N, completions, each) for each in seeds]
        sums = [_sums(stored, gram_NN, config, rows_M, completions) for rows_M in chosen]
        for name in BASELINES:
            figures = figures_of([each[name] for each in sums])
            rows.append({"completions_per_prompt": completions, "baseline": name, "subsets": len(chosen), **figures})
    return rows


def _sums(
    stored: Scored, gram_NN: np.ndarray, config: AdvantagesConfig, rows_M: np.ndarray, completions: int
) -> dict[str, Sums]:
    """Of each baseline on these rows."""
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
    sign_M = _signs(found["leave_one_out"])
    return {name: _sums_of_one(computed, sign_M, groups_M, gram_MM) for name, computed in found.items()}


def _signs(computed: Advantages) -> np.ndarray:
    """Sign of each advantage, 0 where it is no more than the rounding of the rewards."""
    rewards = computed.penalized_reward_N[computed.trained_N]
    smallest = SINGLE * float(np.abs(rewards).max(initial=0.0))
    return np.where(np.abs(computed.advantage_N) > smallest, np.sign(computed.advantage_N), 0.0)


def _sums_of_one(computed: Advantages, sign_M: np.ndarray, groups_M: np.ndarray, gram_MM: np.ndarray) -> Sums:
    trained_M, advantage_M = computed.trained_N, computed.advantage_N
    trained, groups = advantage_M[trained_M], len(np.unique(groups_M))
    return Sums(
        trained=len(trained),
        advantage=float(trained.sum()),
        squares=float(trained.var() * len(trained)) if len(trained) else 0.0,
        groups=groups,
        zero_groups=groups - len(np.unique(groups_M[advantage_M != 0])),
        compared=int((sign_M != 0).sum()),
        agreeing=int(((sign_M != 0) & (np.sign(advantage_M) == sign_M)).sum()),
        moments=gradient_moments(gram_MM, advantage_M, trained_M, groups_M),
    )


def figures_of(sums: Sequence[Sums]) -> dict[str, float | None]:
    """One baseline's figures over all choices: each a ratio of sums, None where nothing was trained on or compared."""
    steps = [each.moments for each in sums if each.trained]  # without trained rows there is no gradient to speak of
    trained = sum(each.trained for each in sums)
    return {
        "advantage_mean": _ratio(sum(each.advantage for each in sums), trained),
        "advantage_variance": _ratio(sum(each.squares for each in sums), trained),
        "zero_groups": _ratio(sum(each.zero_groups for each in sums), sum(each.groups for each in sums)),
        "sign_agreement": _ratio(sum(each.agreeing for each in sums), sum(each.compared for each in sums)),
        "gradient_squared_norm": _ratio(sum(each.squared_norm for each in steps), len(steps)),
        "gradient_variance": _ratio(sum(each.variance for each in steps), len(steps)),
        "relative_variance": relative_variance(steps),
    }


def _ratio(of: float, over: int) -> float | None:
    return of / over if over else None


def show(rows: Sequence[Row], title: str) -> None:
    """Print the rows as a table."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, box=box.SIMPLE, padding=(0, 0, 0, 1), pad_edge=False)
    columns = {
        "advantage_mean": ("A mean", "z.3f"),
        "advantage_variance": ("A var", ".3g"),
        "zero_groups": ("zero", ".0%"),
        "sign_agreement": ("sign", ".0%"),
        "gradient_variance": ("grad var", ".3g"),
        "relative_variance": ("/ |E G|²", ".3g"),
    }
    table.add_column("K", justify="right", no_wrap=True)
    table.add_column("baseline", no_wrap=True)
    for heading, _ in columns.values():
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        figures = ["-" if row[key] is None else format(row[key], form) for key, (_, form) in columns.items()]
        table.add_row(str(row["completions_per_prompt"]), row["baseline"], *figures)
    Console().print(table)


def plot(rows: Sequence[Row], path: Path) -> None:
    """Draw variance against K, one line for each baseline, into a PNG file."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    panels = (
        ("gradient_variance", "gradient variance", "log"),
        ("relative_variance", "gradient variance / |E G|²", "log"),
    )
    for axes, (key, label, scale) in zip(figure.subplots(1, 2), panels, strict=True):
        for name in BASELINES:
            mine = [row for row in rows if row["baseline"] == name]
            values = np.array([row[key] for row in mine], np.float64)  # None becomes NaN, a gap
            axes.plot([row["completions_per_prompt"] for row in mine], values, "o-", label=name)
        axes.set(xlabel="K, completions per prompt", ylabel=label, yscale=scale)
        axes.xaxis.get_major_locator().set_params(integer=True)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right upper", fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
