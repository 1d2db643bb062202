"""Whether the hub can be asked: if not, only its cache is, without waiting for it again and again."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rloo_pipeline.check.report import Report
from rloo_pipeline.config import Params
from rloo_pipeline.reward_config import JudgeReward, ModelReward

LONGEST_WAIT = 5.0  # seconds


@contextmanager
def asked_if_there(params: Params, report: Report) -> Iterator[None]:
    """Within it the hub's clients are offline if the hub cannot be reached, which is a warning."""
    datasets = [dataset for split in (params.prompts.train, params.prompts.eval) for dataset in split if dataset.hub]
    models = [params.policy.model, *(model.model for model in params.reward_models.values())]
    models += [reward.model for reward in params.rewards if isinstance(reward, ModelReward)]
    models += [reward.judge for reward in params.rewards if isinstance(reward, JudgeReward)]
    named = [name for name in models if name.count("/") == 1 and not name.startswith((".", "package:"))]
    if (not datasets and not named) or (reason := _why_not()) is None:
        yield
        return
    report.warning("hub", f"{reason}: of its models and datasets only what its cache holds is looked at")
    with _offline(with_datasets=bool(datasets)):
        yield


def _why_not() -> str | None:
    import httpx
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    try:
        httpx.head(constants.ENDPOINT, timeout=LONGEST_WAIT)
    except httpx.TransportError as error:
        return f"{constants.ENDPOINT} cannot be reached ({str(error) or type(error).__name__})"
    return None


@contextmanager
def _offline(*, with_datasets: bool) -> Iterator[None]:
    from huggingface_hub import constants

    switches: list[Any] = [constants]
    if with_datasets:
        import datasets

        switches.append(datasets.config)
    before = [switch.HF_HUB_OFFLINE for switch in switches]
    for switch in switches:
        switch.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        for switch, value in zip(switches, before, strict=True):
            switch.HF_HUB_OFFLINE = value
