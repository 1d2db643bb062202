import copy
import json
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.torch import load_file

from rloo_pipeline.config import parse_params
from rloo_pipeline.data.images import images_of, read_images
from rloo_pipeline.errors import UserError
from rloo_pipeline.layout import Layout
from rloo_pipeline.manifest import read_manifest
from rloo_pipeline.policy.batches import rows_of
from rloo_pipeline.policy.images import load_vision, row_images
from rloo_pipeline.policy.load import load_model
from rloo_pipeline.policy.logprobs import score
from rloo_pipeline.schema import ROLLOUTS
from rloo_pipeline.shards import read_shards, read_table
from rloo_pipeline.stages import dispatch
from tests.pictures import picture, user
from tests.project import PARAMS, Project
from tests.sampling import Counter
from tests.tiny import make_vlm_policy

# What TRL gives: PIL images, and prompts with them inside.
REWARD = """
def score(prompts, completions, images, **kwargs):
    for prompt, pictures in zip(prompts, images, strict=True):
        (message,) = [message for message in prompt if message["role"] == "user"]
        *parts, text = message["content"]
        assert [part["image"] for part in parts] == pictures and text["type"] == "text"
        assert all(picture.convert("RGB").size == (40, 30) for picture in pictures)
    texts = [completion[0]["content"] for completion in completions]
    return [len(pictures) + sum(map(ord, text)) % 11 / 10 for text, pictures in zip(texts, images, strict=True)]
"""
FILES = {"one.png": picture(1), "two.jpg": picture(2, kind="JPEG"), "three.png": picture(3)}
TRAIN = [["photos/one.png"], ["photos/two.jpg", "photos/three.png"], None, ["photos/one.png"]]
EVAL = [[{"bytes": picture(5), "path": None}], []]
SOURCES = {"tiny": "policy", "train.jsonl": "prompts", "eval.parquet": "prompts", "photos": "prompts"}
SETTINGS = {
    "sources": {path.partition(".")[0]: {"path": path, "used_by": used_by} for path, used_by in SOURCES.items()},
    "prompts": {"train": {"file": "train.jsonl"}, "eval": {"file": "eval.parquet"}, "images_column": "images"},
    "execution": {"threads": 1, "tracking": False, "logprobs_batch_tokens": 150, "update_microbatch_tokens": 150},
}
STAGES = ("rollouts", "logprobs", "rewards", "advantages", "update")


class Photos:
    """A project of prompts with images around a tiny vision-language policy, whose stages run in this process."""

    def __init__(self, root):
        self.root, self.layout = root, Layout(root)
        self.params = parse_params(copy.deepcopy(PARAMS) | SETTINGS)

    def run(self, *stages, iteration="0001"):
        for stage in stages:
            dispatch.run(stage, self.layout, self.params, iteration)

    def fingerprints(self):
        directories = (getattr(self.layout, stage)("0001") for stage in ("rollouts", "logprobs", "advantages", "model"))
        return [read_manifest(directory)["fingerprint"] for directory in directories]


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    root = tmp_path_factory.mktemp("photos")
    make_vlm_policy(root / "tiny")
    (root / "photos").mkdir()
    for name, image in FILES.items():
        (root / "photos" / name).write_bytes(image)
    rows = [{"prompt": user(f"Say {row}:"), "answer": "a", "images": cell} for row, cell in enumerate(TRAIN)]
    (root / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    held_out = {"prompt": [user("And?"), user("Or?")], "answer": ["a", "b"], "images": EVAL}
    pq.write_table(pa.table(held_out), root / "eval.parquet")
    (root / "reward.py").write_text(REWARD)
    made = Photos(root)
    made.run("prepare", iteration="0000")
    made.run("evaluate", iteration="0000")
    made.run(*STAGES, "evaluate")
    return made


def test_prompts_hold_the_images_as_given(photos):
    train, _ = read_table(photos.layout.prompts / "train.parquet")
    given = [None if cell is None else [FILES[path.removeprefix("photos/")] for path in cell] for cell in TRAIN]
    assert train["images"].to_pylist() == given
    held_out, _ = read_table(photos.layout.prompts / "eval.parquet")
    assert held_out["images"].to_pylist() == [[EVAL[0][0]["bytes"]], None]


def test_rollouts_hold_each_image_once_beside_rows_as_ever(photos):
    directory = photos.layout.rollouts("0001")
    assert read_shards(directory).schema == ROLLOUTS
    images = read_images(directory, read_manifest(directory)["facts"])
    by_row = [[FILES[path.removeprefix("photos/")] for path in cell] for cell in TRAIN if cell]
    assert sorted(images.values()) == sorted(by_row)
    assert pq.read_table(directory / "images" / "images.parquet").num_rows == 3


def test_policy_and_sampler_agree(photos):
    rollouts, logprobs = (read_shards(getattr(photos.layout, name)("0001")) for name in ("rollouts", "logprobs"))
    sampler = np.concatenate(rows_of(rollouts, "sampler_logprobs"))
    assert np.concatenate(rows_of(logprobs, "policy_logprobs")) == pytest.approx(sampler, abs=1e-4)
    assert logprobs["policy_logprobs"] == logprobs["reference_logprobs"]


def test_update_trains_language_model_and_image_encoder(photos):
    before, after = (load_file(photos.layout.model(name) / "model.safetensors") for name in ("0000", "0001"))
    changed = {name for name in before if not before[name].equal(after[name])}
    assert any("language_model" in name for name in changed)
    assert any("vision_tower" in name for name in changed)
    metrics = json.loads((photos.root / "metrics" / "update" / "0001.json").read_text())
    assert metrics["completions"] == 16
    assert metrics["sampler_gap/token_max"] < 1e-4


def test_evaluation_compares_with_the_reference_on_the_same_images(photos):
    rows = read_shards(photos.layout.evaluation("0001"))
    held_out, _ = read_table(photos.layout.prompts / "eval.parquet")
    images = images_of(held_out)
    initial = photos.layout.model("0000")
    ids = rows_of(rows, "prompt_token_ids"), rows_of(rows, "completion_token_ids")
    seen = row_images(load_vision(initial), images, rows)
    reference = score(load_model(initial, "float32", images=True), *ids, 1.0, 1, Counter(), seen)
    pairs = zip(rows_of(rows, "sampler_logprobs"), reference, strict=True)
    expected = [float(sampled.sum() - given.sum()) for sampled, given in pairs]
    assert rows["kl"].to_pylist() == pytest.approx(expected, abs=1e-4)
    assert max(map(abs, expected)) > 1e-3


def test_run_again_gives_the_same(photos):
    before = photos.fingerprints()
    photos.run(*STAGES)
    assert photos.fingerprints() == before


def test_other_images_than_were_sampled_from_are_refused(photos):
    path = photos.layout.rollouts("0001") / "images" / "images.parquet"
    before = path.read_bytes()
    try:
        path.write_bytes(before.replace(FILES["one.png"][-60:-20], bytes(40)))
        with pytest.raises(UserError, match=r"images\.parquet"):
            photos.run("logprobs")
    finally:
        path.write_bytes(before)


def test_text_runs_need_no_pillow(tmp_path, monkeypatch):
    project = Project.create(tmp_path / "text")
    layout, params = Layout(project.root), parse_params(PARAMS)
    for name in [name for name in sys.modules if name.split(".")[0] == "PIL"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "PIL", None)  # importing it now fails
    for stage, iteration in [("prepare", "0000"), *((stage, "0001") for stage in STAGES)]:
        dispatch.run(stage, layout, params, iteration)
    assert not (layout.rollouts("0001") / "images").exists()
    assert "images" not in read_manifest(layout.rollouts("0001"))["facts"]
