"""How reward models are trained."""

from rloo_pipeline.section import Section


class RewardModelConfig(Section):
    """A reward model trained from preference pairs."""
