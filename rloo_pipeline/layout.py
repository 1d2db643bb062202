"""The only place where artifact paths are spelled; all are relative to the project's folder."""

import posixpath
from dataclasses import dataclass
from pathlib import Path

from rloo_pipeline.errors import UserError

INITIAL = "0000"
STAGES = ("prepare", "rollouts", "logprobs", "rewards", "advantages", "update", "evaluate")
REWARD_MODEL = "reward_model"  # the stage that runs once for each reward model, by name in place of an iteration


def check_iteration(iteration: str) -> str:
    """The iteration id itself, if it has four digits; raises UserError otherwise."""
    if len(iteration) != 4 or not iteration.isascii() or not iteration.isdigit():
        raise UserError(f"iteration {iteration!r}: an iteration id has four digits, as in 0001")
    return iteration


@dataclass(frozen=True)
class Layout:
    """Where everything of one project lies."""

    root: Path = Path()

    @property
    def params(self) -> Path:
        return self.root / "params.yaml"

    @property
    def artifacts(self) -> Path:
        return self.root / "artifacts"

    @property
    def prompts(self) -> Path:
        return self.artifacts / "prompts"

    def policy(self, iteration: str) -> Path:
        return self.artifacts / "policy" / iteration

    def model(self, iteration: str) -> Path:
        return self.policy(iteration) / "model"

    def trainer_state(self, iteration: str) -> Path:
        return self.policy(iteration) / "trainer_state"

    def rollouts(self, iteration: str) -> Path:
        return self.artifacts / "rollouts" / iteration

    def logprobs(self, iteration: str) -> Path:
        return self.artifacts / "logprobs" / iteration

    def rewards(self, iteration: str) -> Path:
        return self.artifacts / "rewards" / iteration

    def advantages(self, iteration: str) -> Path:
        return self.artifacts / "advantages" / iteration

    def evaluation(self, iteration: str) -> Path:
        return self.artifacts / "evaluation" / iteration

    def reward_model(self, name: str) -> Path:
        return self.artifacts / "reward_models" / name

    def preferences(self, name: str) -> Path:
        """The held-out pairs as a reward model scores them, and its training steps."""
        return self.artifacts / "preferences" / name

    def source(self, used_by: str, name: str) -> Path:
        return self.root / "sources" / used_by / f"{name}.json"

    def metrics(self, stage: str, iteration: str) -> Path:
        return self.root / "metrics" / stage / f"{iteration}.json"

    def timings(self, stage: str, iteration: str) -> Path:
        return self.root / "timings" / stage / f"{iteration}.json"

    def provenance(self, stage: str, iteration: str) -> Path:
        return self.root / "provenance" / stage / f"{iteration}.json"

    def kept_provenance(self, stage: str, iteration: str) -> Path:
        """The provenance of every run that was here: DVC restores an older run's output without its provenance."""
        return self.state / "provenance" / stage / iteration

    @property
    def history(self) -> Path:
        return self.artifacts / "history.json"

    def report(self, name: str, iteration: str, suffix: str) -> Path:
        """A file for people that no stage reads."""
        return self.root / "reports" / name / f"{iteration}.{suffix}"

    @property
    def state(self) -> Path:
        """Work in progress, locks and whatever else is neither an artifact nor a record."""
        return self.root / ".rloo"

    def work(self, stage: str, iteration: str, key: str) -> Path:
        """Partial output of a stage, keyed by the fingerprint of its inputs and settings."""
        return self.state / "work" / stage / iteration / key


def note_of(work: Path) -> Path:
    """The file beside a stage's partial output that tells what its key was made of."""
    return work.with_name(f"{work.name}.json")


def reward_model_at(path: Path) -> str | None:
    """The name of the reward model whose directory `path` is, relative to the project; None for any other path."""
    plain = Path(posixpath.normpath(path.as_posix()))
    return plain.name if plain == Layout().reward_model(plain.name) else None
