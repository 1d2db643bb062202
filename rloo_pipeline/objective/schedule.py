"""The learning rate of each optimizer step, counted over the whole chain of iterations."""

import math
from typing import Literal

Schedule = Literal["constant", "linear", "cosine"]


def learning_rate(
    step: int, peak: float, warmup_steps: int, schedule: Schedule = "constant", schedule_steps: int | None = None
) -> float:
    """Rate of the step counted from 0: peak * (step + 1) / warmup_steps, then constant, or down to 0 at schedule_steps.

    It depends on nothing but the count, so a resumed chain goes on where it was. Raises ValueError if a linear or
    cosine schedule does not end after its warm-up.
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if schedule == "constant":
        return peak
    if schedule_steps is None or schedule_steps <= warmup_steps:
        raise ValueError(f"schedule {schedule} needs schedule_steps above warmup_steps ({warmup_steps})")
    done = min((step - warmup_steps) / (schedule_steps - warmup_steps), 1.0)
    return peak * (1 - done) if schedule == "linear" else peak * 0.5 * (1 + math.cos(math.pi * done))
