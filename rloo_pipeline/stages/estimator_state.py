"""What the estimator keeps from iteration to iteration: the mean of past rewards and the adapted weight of the KL.

`advantages` reads it from the trainer state of the previous policy and puts the next one into its manifest's facts;
`update` copies that into the trainer state which it writes.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rloo_pipeline.objective.advantages import Advantages
from rloo_pipeline.objective.baselines import RunningMean
from rloo_pipeline.objective.kl import adapted_beta
from rloo_pipeline.objective_config import AdvantagesConfig
from rloo_pipeline.policy.trainer_state import read_counters


@dataclass(frozen=True)
class State:
    """The state at the start of an iteration."""

    past: RunningMean  # of penalized rewards, since moving_average was chosen
    beta: float  # weight of the KL in this iteration, reward units per nat

    @classmethod
    def read(cls, directory: Path, config: AdvantagesConfig) -> "State":
        """The state in a trainer state; what the settings do not ask for, or is not there yet, starts anew."""
        counters = read_counters(directory)
        past = RunningMean(**counters["past_rewards"]) if "past_rewards" in counters else RunningMean()
        adapted = config.target_kl is not None and "beta" in counters
        return cls(past, float(counters["beta"]) if adapted else config.beta)

    def facts(self, config: AdvantagesConfig, computed: Advantages) -> dict[str, Any]:
        """What `update` must know beside the rows: the KL term of its loss, and the state to hand on."""
        facts: dict[str, Any] = {}
        carried = self.following(config, computed)
        if carried:
            facts["carried"] = carried
        if config.kl_in == "loss" and self.beta > 0:
            facts["kl_in_loss"] = {
                "beta": self.beta,
                "estimator": config.kl_estimator,
                "normalization": config.kl_normalization,
            }
        return facts

    def following(self, config: AdvantagesConfig, computed: Advantages) -> Mapping[str, Any]:
        """The next iteration's state as JSON, only of what the settings use."""
        state: dict[str, Any] = {}
        if config.baseline == "moving_average":
            state["past_rewards"] = asdict(self.past.including(computed.penalized_reward_N[computed.in_baseline_N]))
        if config.target_kl is not None:
            state["beta"] = adapted_beta(self.beta, float(computed.kl_N.mean()), config.target_kl)
        return state
