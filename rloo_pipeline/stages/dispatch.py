"""What each stage is given of the parameters: its context, its own section, and the few values it shares."""

from rloo_pipeline.config import IterationConfig, Params
from rloo_pipeline.errors import UserError
from rloo_pipeline.layout import INITIAL, REWARD_MODEL, Layout
from rloo_pipeline.stages.context import Context, make_context

ONLINE = (REWARD_MODEL, "prepare", "rewards", "evaluate")  # may ask a hub or a reward service; the others must not


def run(stage: str, layout: Layout, params: Params, iteration: str) -> None:
    """Run one stage of one iteration (or of one reward model); raises UserError for whatever the user can mend."""
    if stage == "prepare":
        _prepare(layout, params, iteration)
        return
    if stage == REWARD_MODEL:
        _reward_model(layout, params, iteration)
        return
    context = make_context(params, layout, iteration, initial=stage == "evaluate")
    if stage == "rollouts":
        from rloo_pipeline.stages import rollouts

        rollouts.run(context, params.rollouts)
    elif stage == "logprobs":
        from rloo_pipeline.stages import logprobs

        logprobs.run(context, params.logprobs)
    elif stage == "rewards":
        from rloo_pipeline.stages import rewards

        rewards.run(context, params.rewards)
    elif stage == "advantages":
        from rloo_pipeline.stages import advantages

        advantages.run(context, params.advantages)
    elif stage == "update":
        from rloo_pipeline.stages import update

        update.run(context, params.update)
    elif stage == "evaluate":
        from rloo_pipeline.stages import evaluate

        evaluate.run(context, params.evaluate, params.rewards)
    else:
        raise ValueError(f"no stage is called {stage}")


def _prepare(layout: Layout, params: Params, iteration: str) -> None:
    from rloo_pipeline.stages import prepare

    if iteration != INITIAL:
        raise UserError(f"prepare {iteration}: it runs once, before the first iteration; leave the id out")
    context = make_context(params, layout, INITIAL, initial=True)
    max_tokens = {"train": params.rollouts.max_tokens, "eval": params.evaluate.max_tokens}
    prepare.run(context, params.policy, params.prompts, max_tokens, len(params.iterations))


def _reward_model(layout: Layout, params: Params, name: str) -> None:
    from rloo_pipeline.stages import reward_model

    if name not in params.reward_models:
        known = ", ".join(params.reward_models) or "none"
        raise UserError(f"reward_model {name}: {layout.params} has no such entry under reward_models; it has {known}")
    link = IterationConfig(previous=INITIAL, reference=INITIAL)
    context = Context(layout, name, link, params.seed, params.execution, params.sources)
    reward_model.run(context, params.reward_models[name])
