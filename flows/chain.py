"""The stages of a run in order: each evaluation right after its iteration, so that the curve grows during the run."""

from pathlib import Path

from flows import dvc
from rloo_pipeline import algorithms
from rloo_pipeline.config import Params
from rloo_pipeline.layout import REWARD_MODEL, reward_model_at

ITERATION = ("rollouts", "logprobs", "rewards", "advantages", "update", "evaluate")
LAST = "history"


def before_status(root: Path) -> list[str]:
    """The DVC stages whose outcome decides what else has changed: a project's copy of the package's numbers."""
    return [algorithms.STAGE] if algorithms.followed(root) else []


def opening(params: Params) -> list[str]:
    """The DVC stages before the first iteration: a source that is a trained reward model comes after its training."""
    sources = {name: reward_model_at(source.path) for name, source in params.sources.items()}
    return [
        *(f"sources@{name}" for name, trained in sources.items() if trained is None),
        *(f"{REWARD_MODEL}@{name}" for name in params.reward_models),
        *(f"sources@{name}" for name, trained in sources.items() if trained is not None),
        "prepare",
        "evaluate_initial",
    ]


def of_iteration(iteration: str) -> list[str]:
    """The DVC stages of one iteration, and the history that then has one row more."""
    return [*(f"{stage}@{iteration}" for stage in ITERATION), LAST]


def to_run(root: Path, params: Params, *, allow_missing: bool = False) -> tuple[list[str], list[str]]:
    """The opening stages if one of them is changed, and the iterations from the first that has something to run.

    What is left out is unchanged, so a long chain is not looked through stage by stage; of what is left in, DVC decides
    on each stage again.
    """
    changed = dvc.changed(root, allow_missing=allow_missing)
    first, iterations = opening(params), sorted(params.iterations)
    if changed & set(first):
        return first, iterations
    for place, iteration in enumerate(iterations):
        if changed & {f"{stage}@{iteration}" for stage in ITERATION}:
            return [], iterations[place:]
    return [], []
