"""Files of the user's own: which ones the params name, and whether DVC watches them."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from rloo_pipeline import fingerprint
from rloo_pipeline.config import Params, RewardConfig, SourceConfig
from rloo_pipeline.data_config import TableConfig
from rloo_pipeline.errors import UserError
from rloo_pipeline.layout import Layout, reward_model_at
from rloo_pipeline.reward_config import FunctionReward, JudgeReward, ModelReward
from rloo_pipeline.rewards.sources import user_file


def named_files(params: Params, root: Path) -> Iterator[tuple[str, str, Path]]:
    """(where it is named, the section that uses it, path) of every file or directory of the user's own."""
    if (root / params.policy.model).is_dir():
        yield "policy.model", "policy", Path(params.policy.model)
    for split, datasets in (("train", params.prompts.train), ("eval", params.prompts.eval)):
        for path in (path for dataset in datasets for path in _dataset_files(dataset)):
            yield f"prompts.{split}", "prompts", path
    for name, model in params.reward_models.items():
        if (root / model.model).is_dir():
            yield f"reward_models.{name}.model", "reward_models", Path(model.model)
        for split, dataset in (("train", model.train), ("eval", model.eval)):
            for path in _dataset_files(dataset):
                yield f"reward_models.{name}.{split}", "reward_models", path
    for reward in params.rewards:
        for path in _reward_files(reward, root):
            yield f"rewards, {reward.name}", "rewards", path


def _dataset_files(dataset: TableConfig) -> Iterator[Path]:
    if dataset.file is not None:
        yield dataset.file
    for spec in (dataset.generator, dataset.filter):
        if spec is not None and (path := user_file(spec)):
            yield path


def _reward_files(reward: RewardConfig, root: Path) -> Iterator[Path]:
    if isinstance(reward, FunctionReward) and (path := user_file(reward.function)):
        yield path
    model = reward.model if isinstance(reward, ModelReward) else reward.judge if isinstance(reward, JudgeReward) else ""
    if model and ((root / model).is_dir() or reward_model_at(Path(model))):
        yield Path(model)


def missing(path: Path) -> str:
    """What is wrong when a listed path is not there."""
    if reward_model_at(path):
        return f"{path}: not trained yet; `dvc repro` trains what params.yaml lists under reward_models, then goes on"
    return f"{path}: no such file or directory; paths are relative to the project's folder"


def fingerprints(sources: Mapping[str, SourceConfig], used_by: str, root: Path) -> dict[str, str]:
    """The fingerprint of every listed file and directory that a section uses, those that others import among them."""
    paths = sorted({source.path for source in sources.values() if source.used_by == used_by})
    for path in paths:
        if not (root / path).exists():
            raise UserError(f"sources: {missing(path)}")
    return {f"source:{path.as_posix()}": fingerprint.of_path(root / path) for path in paths}


def check_listed(params: Params, root: Path) -> None:
    """Raise UserError if the params name a file that `sources` does not list: DVC would not see it change."""
    for wrong in unlisted(params, root):
        raise UserError(wrong)


def unlisted(params: Params, root: Path) -> Iterator[str]:
    """What is wrong with `sources`, and what to do: files that it lacks, and records of what it has no more."""
    yield from _left_records(params, root)
    listed = {(source.used_by, (root / source.path).resolve()) for source in params.sources.values()}
    for where, used_by, path in named_files(params, root):
        target, trained = (root / path).resolve(), reward_model_at(path)
        if trained and trained not in params.reward_models and not target.exists():
            known = ", ".join(params.reward_models) or "none"
            yield f"{where} names {path}, but reward_models has no {trained}; it has {known}"
        elif not any(by == used_by and (known == target or known in target.parents) for by, known in listed):
            yield (
                f"{where} names {path}, which `sources` does not list, so an edit of it would rerun nothing; add to "
                f"params.yaml under sources:\n  {used_by}_{path.stem}: {{path: {path}, used_by: {used_by}}}"
            )


def _left_records(params: Params, root: Path) -> Iterator[str]:
    """Records of sources that are no longer listed: the stages would go on depending on them."""
    records = {Layout(root).source(source.used_by, name) for name, source in params.sources.items()}
    for path in sorted((root / "sources").glob("*/*.json")):
        if path not in records:
            yield f"{path}: params.yaml lists no such source, but stages depend on it; remove the file"
