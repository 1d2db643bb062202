"""Files of the user's own: which ones the params name, and whether DVC watches them."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from rloo_pipeline import fingerprint
from rloo_pipeline.config import DatasetConfig, Params, RewardConfig
from rloo_pipeline.errors import UserError
from rloo_pipeline.rewards.sources import user_file


def named_files(params: Params, root: Path) -> Iterator[tuple[str, str, Path]]:
    """(where it is named, the section that uses it, path) of every file or directory of the user's own."""
    if (root / params.policy.model).is_dir():
        yield "policy.model", "policy", Path(params.policy.model)
    for split, dataset in (("train", params.prompts.train), ("eval", params.prompts.eval)):
        for path in _dataset_files(dataset):
            yield f"prompts.{split}", "prompts", path
    for reward in params.rewards:
        for path in _reward_files(reward, root):
            yield f"rewards, {reward.name}", "rewards", path


def _dataset_files(dataset: DatasetConfig) -> Iterator[Path]:
    if dataset.file is not None:
        yield dataset.file
    if dataset.generator is not None and (path := user_file(dataset.generator)):
        yield path


def _reward_files(reward: RewardConfig, root: Path) -> Iterator[Path]:
    if reward.function is not None and (path := user_file(reward.function)):
        yield path
    if reward.model is not None and (root / reward.model).is_dir():
        yield Path(reward.model)


def reward_files(rewards: Sequence[RewardConfig], root: Path) -> dict[str, str]:
    """The fingerprint of every file and directory that the rewards name."""
    paths = {path for reward in rewards for path in _reward_files(reward, root) if (root / path).exists()}
    return {f"source:{path.as_posix()}": fingerprint.of_path(root / path) for path in sorted(paths)}


def check_listed(params: Params, root: Path) -> None:
    """Raise UserError if the params name a file that `sources` does not list: DVC would not see it change."""
    listed = {(source.used_by, (root / source.path).resolve()) for source in params.sources.values()}
    for where, used_by, path in named_files(params, root):
        target = (root / path).resolve()
        if not any(by == used_by and (known == target or known in target.parents) for by, known in listed):
            raise UserError(
                f"{where} names {path}, which `sources` does not list, so an edit of it would rerun nothing; add to "
                f"params.yaml under sources:\n  {used_by}_{path.stem}: {{path: {path}, used_by: {used_by}}}"
            )
