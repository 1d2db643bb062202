"""What a run costs in tokens."""

from dataclasses import dataclass

from rloo_pipeline.config import Params


@dataclass(frozen=True)
class Cost:
    """Tokens: sampled ones at most (every completion at max_tokens), passed ones with the prompts before them."""

    prompts: int  # read by the sampler, each prompt once
    sampled: int  # completion tokens, at most
    scored: int  # passes of policy and reference, at most
    trained: int  # forward and backward passes, at most

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(*(mine + theirs for mine, theirs in zip(vars(self).values(), vars(other).values(), strict=True)))

    def __mul__(self, times: int) -> "Cost":
        return Cost(*(value * times for value in vars(self).values()))

    def __str__(self) -> str:
        told = {
            "prompt tokens": self.prompts,
            "completion tokens at most": self.sampled,
            "scored at most": self.scored,
            "trained on at most": self.trained,
        }
        return ", ".join(f"{_short(value)} {what}" for what, value in told.items() if value)


def _short(value: int) -> str:
    for size, unit in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return str(value)


def iteration(params: Params, prompt_tokens: float) -> Cost:
    """One iteration's rollouts, log-probs and update; prompt_tokens: the mean length of a training prompt."""
    prompts, samples = params.rollouts.prompts_drawn, params.rollouts.completions_per_prompt
    sampled = prompts * samples * params.rollouts.max_tokens
    whole = sampled + round(prompts * samples * prompt_tokens)
    # Of prompts in surplus only those that are wanted are trained on.
    trained = whole * params.rollouts.prompts_per_iteration // prompts
    return Cost(
        round(prompts * prompt_tokens), sampled, whole * (1 + params.logprobs.reference), trained * params.update.epochs
    )


def evaluation(params: Params, prompts: int, prompt_tokens: float) -> Cost:
    """One evaluation of `prompts` held-out prompts of this mean length; the reference scores its samples."""
    samples = prompts * params.evaluate.samples_per_prompt
    sampled = samples * params.evaluate.max_tokens
    return Cost(round(prompts * prompt_tokens), sampled, sampled + round(samples * prompt_tokens), 0)


def chain(params: Params, one: Cost, evaluated: Cost) -> Cost:
    """All iterations, and the evaluations of the initial policy and of those that are to be evaluated."""
    evaluations = 1 + sum(item.evaluate for item in params.iterations.values())
    return one * len(params.iterations) + evaluated * evaluations
