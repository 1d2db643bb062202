"""Models and datasets by their hub names, from a hub cache made here: the same calls, no network."""

from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub import constants

from rloo_pipeline.data.load import load_rows
from rloo_pipeline.data.splits import load_prompts
from rloo_pipeline.data_config import DatasetConfig, PromptsConfig
from rloo_pipeline.errors import UserError
from tests.pictures import picture
from tests.project import Project
from tests.tiny import make_policy


def cached(cache: Path, revisions: dict[str, int]) -> None:
    """A hub cache with a tiny model of another seed at each revision."""
    repository = cache / "models--team--tiny"
    for number, (revision, seed) in enumerate(revisions.items(), start=1):
        commit = f"{number:040x}"
        make_policy(repository / "snapshots" / commit, seed=seed)
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / revision).write_text(commit)


@pytest.mark.parametrize(("revision", "seed"), [(None, 1), ("v2", 2)])
def test_a_policy_of_the_hub_at_its_revision(tmp_path: Path, revision: str | None, seed: int) -> None:
    cached(tmp_path / "hub", {"main": 1, "v2": 2})
    project = Project.create(tmp_path / "project")
    project.change("policy.model", "team/tiny")
    project.change("policy.revision", revision)
    project.run("rloo", "prepare", HF_HUB_CACHE=str(tmp_path / "hub"))
    expected = make_policy(tmp_path / "expected", seed=seed) / "model.safetensors"
    assert (project.root / "artifacts/policy/0000/model/model.safetensors").read_bytes() == expected.read_bytes()


def test_a_dataset_as_the_hub_client_loads_it(tmp_path: Path) -> None:
    """A directory of Parquet files is a dataset to the hub client just as a repository of them is."""
    (tmp_path / "additions").mkdir()
    for split, answers in (("train", ["3", "7"]), ("test", ["9"])):
        rows = pa.table({"prompt": [f"Say {answer}" for answer in answers], "answer": answers})
        pq.write_table(rows, tmp_path / "additions" / f"{split}-00000-of-00001.parquet")
    table = load_rows(DatasetConfig(hub=str(tmp_path / "additions"), split="train"), tmp_path)
    assert table.to_pylist() == [{"prompt": "Say 3", "answer": "3"}, {"prompt": "Say 7", "answer": "7"}]


def test_images_in_the_hub_cache_need_no_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A repository of image files with metadata gives paths into the cache; elsewhere they are refused."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    repository = tmp_path / "hub" / "datasets--team--photos" / "snapshots" / "1"
    repository.mkdir(parents=True)
    for number in (1, 2):
        (repository / f"{number}.png").write_bytes(picture(number))
    (repository / "metadata.csv").write_text("file_name,prompt\n1.png,What?\n2.png,And this?\n")
    dataset = {"hub": str(repository), "split": "train"}
    config = PromptsConfig(train=dataset, eval=dataset, system_prompt="Look.", images_column="image")
    with pytest.raises(UserError, match="is in nothing that `sources` lists"):
        load_prompts(config, tmp_path, 1)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    table = load_prompts(config, tmp_path, 1)["train"].table
    assert table["images"].to_pylist() == [[picture(1)], [picture(2)]]


def test_a_dataset_by_its_configuration_and_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "sums").mkdir()
    for name in ("easy", "hard"):
        pq.write_table(pa.table({"prompt": [name]}), tmp_path / "sums" / f"{name}.parquet")
    listed = "".join(f"- config_name: {name}\n  data_files: {name}.parquet\n" for name in ("easy", "hard"))
    (tmp_path / "sums" / "README.md").write_text(f"---\nconfigs:\n{listed}---\n")
    # A folder has no revisions, so what is asked of the hub client is looked at.
    asked, load = [], datasets.load_dataset
    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **k: asked.append(k["revision"]) or load(*a, **k))
    config = DatasetConfig(hub=str(tmp_path / "sums"), name="hard", split="train", revision="v2")
    assert load_rows(config, tmp_path).to_pylist() == [{"prompt": "hard"}]
    assert asked == ["v2"]
