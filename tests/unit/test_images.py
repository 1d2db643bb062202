import re
from io import BytesIO
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image

from rloo_pipeline.config import ExecutionConfig
from rloo_pipeline.data.images import IMAGES, as_seen, check_images, decode, has_images, images_of, with_images
from rloo_pipeline.data.keep import Rows
from rloo_pipeline.engines import Request
from rloo_pipeline.engines.choose import choose_engine, open_engine
from rloo_pipeline.errors import UserError
from rloo_pipeline.policy.batches import collate
from rloo_pipeline.policy.images import RowImages, Vision, load_vision
from rloo_pipeline.policy.load import load_model
from rloo_pipeline.policy.logprobs import score, score_batch
from tests.pictures import PICTURES, PROMPTS, picture, user
from tests.sampling import Counter
from tests.tiny import make_policy, make_vlm, make_vlm_policy

KINDS = ("llava", "idefics3", "qwen2_vl", "gemma3")
TEMPERATURE = 0.7


def like(image: bytes) -> bytes:
    """Other pixels of the same size."""
    return picture(9, *Image.open(BytesIO(image)).size)


class Sampled:
    """A tiny policy with what it sampled for the prompts, twice each, in batches of three."""

    def __init__(self, folder, kind):
        torch.set_num_threads(1)  # as the engine below does
        self.path = make_vlm_policy(folder, kind)
        self.vision = load_vision(self.path)
        self.model = load_model(self.path, "float32", images=True)
        self.texts, prompts = self.vision.render(PROMPTS, PICTURES)
        self.owners = [row for row in range(len(prompts)) for _ in range(2)]
        self.prompts = [prompts[row] for row in self.owners]
        self.images = RowImages(self.vision, [PICTURES[row] for row in self.owners])
        self.samples = self.generate(batch_size=3)
        self.completions = [sample.token_ids for sample in self.samples]

    def generate(self, batch_size):
        engine = open_engine(
            "transformers",
            self.path,
            max_model_len=128,
            max_tokens=6,
            temperature=TEMPERATURE,
            dtype="float32",
            seed=0,
            execution=ExecutionConfig(generation_batch_size=batch_size, threads=1),
            images=True,
        )
        rows = zip(self.prompts, self.images.images_N, strict=True)
        return engine.generate([Request(ids, 100 + n, images) for n, (ids, images) in enumerate(rows)], Counter())

    def score(self, images=None, batch_tokens=200):
        given = (self.model, self.prompts, self.completions, TEMPERATURE, batch_tokens, Counter())
        return score(*given, images or self.images)


@pytest.fixture(scope="module", params=KINDS)
def sampled(request, tmp_path_factory):
    return Sampled(tmp_path_factory.mktemp(request.param), request.param)


def test_transparency_is_converted_to_rgb(sampled):
    """The alpha channel is let go, in the prompt's ids and in the pixels alike."""
    transparent = Image.open(BytesIO(picture(1)))
    transparent.putalpha(Image.open(BytesIO(picture(5))).convert("L"))
    plain = transparent.convert("RGB")
    files = []
    for image in (transparent, plain):
        image.save(buffer := BytesIO(), "PNG")
        files.append(buffer.getvalue())
    (_, ids), (_, expected_ids) = (sampled.vision.render(PROMPTS[:1], [[file]]) for file in files)
    assert ids == expected_ids
    given, expected = (sampled.vision.inputs([[file]], torch.tensor(ids), sampled.model) for file in files)
    assert given.keys() == expected.keys()
    for name, values in expected.items():
        torch.testing.assert_close(given[name], values, rtol=0, atol=0)


def plain_logprobs(sampled, row):
    """By the library's own processor and forward pass of one row, in no batch."""
    owner = sampled.owners[row]
    pictures = [Image.open(BytesIO(image)) for image in PICTURES[owner]]
    processor = sampled.vision.processor
    inputs = processor(
        text=[sampled.texts[owner]], images=[pictures] if pictures else None, add_special_tokens=False,
        return_tensors="pt",
    )  # fmt: skip
    assert inputs["input_ids"][0].tolist() == sampled.prompts[row]
    completion = torch.tensor([sampled.completions[row]])
    ids = torch.cat([inputs["input_ids"], completion], dim=1)
    inputs["input_ids"], inputs["attention_mask"] = ids, torch.ones_like(ids)
    for name in {"mm_token_type_ids", "token_type_ids"} & set(inputs):
        inputs[name] = torch.cat([inputs[name], torch.zeros_like(completion)], dim=1)
    with torch.no_grad():
        logits = sampled.model(**inputs).logits[0, len(sampled.prompts[row]) - 1 : -1].double()
    logits[:, list(sampled.vision.placeholders)] = -torch.inf
    return (logits / TEMPERATURE).log_softmax(-1).gather(-1, completion.T)[:, 0].tolist()


def test_logprobs_are_those_of_a_plain_forward_pass_and_of_the_sampler(sampled):
    for row, (got, sample) in enumerate(zip(sampled.score(), sampled.samples, strict=True)):
        assert got.tolist() == pytest.approx(plain_logprobs(sampled, row), abs=1e-4)
        assert got.tolist() == pytest.approx(sample.logprobs, abs=1e-4)


def test_samples_do_not_depend_on_the_batch(sampled):
    alone = sampled.generate(batch_size=1)
    assert [sample.token_ids for sample in alone] == sampled.completions
    for one, other in zip(alone, sampled.samples, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


def test_images_matter(sampled):
    others = RowImages(sampled.vision, [[like(image) for image in images] for images in sampled.images.images_N])
    for own, other, images in zip(sampled.score(), sampled.score(others), sampled.images.images_N, strict=True):
        assert (np.abs(own - other).max() > 1e-3) == bool(images)


def test_gradient_reaches_language_model_and_image_encoder(sampled):
    rows = np.arange(len(sampled.prompts))
    batch = collate(sampled.prompts, sampled.completions, rows)
    sampled.model.zero_grad()
    score_batch(sampled.model, batch, TEMPERATURE, sampled.images).logprobs_BT.sum().backward()
    for part in (("language_model", "text_model"), ("vision", "visual")):
        parameters = [p for name, p in sampled.model.named_parameters() if any(word in name for word in part)]
        norms = [parameter.grad.norm().item() for parameter in parameters if parameter.grad is not None]
        assert np.isfinite(norms).all()
        assert max(norms) > 0
    sampled.model.zero_grad()


def test_placeholders_are_never_sampled(sampled):
    """Whatever the model thinks of them: sampler and policy give them probability 0, and the rest sums to 1."""
    forbidden = sampled.vision.placeholders
    assert not {token for tokens in sampled.completions for token in tokens} & set(forbidden)
    completions = [[token] for token in range(len(sampled.vision.processor.tokenizer)) if token not in forbidden]
    prompts = [sampled.prompts[0]] * len(completions)
    images = RowImages(sampled.vision, [PICTURES[0]] * len(completions))
    got = score(sampled.model, prompts, completions, TEMPERATURE, 2000, Counter(), images)
    assert np.exp(np.concatenate(got)).sum() == pytest.approx(1, abs=1e-4)


def read(cells, column="photo", root=None, watched=(Path(),), **others):
    table = pa.table({column: cells, **others})
    return with_images(Rows("data", table, np.arange(5, 5 + table.num_rows)), "photo", root, watched).table


def test_images_are_read_as_people_have_them(tmp_path):
    first, second = picture(1), picture(2, kind="JPEG")
    (tmp_path / "second.jpg").write_bytes(second)
    one = [[first], [second], None]
    assert read([first, second, None])["images"].to_pylist() == one
    structs = [{"bytes": first, "path": "gone.png"}, {"bytes": None, "path": "second.jpg"}, None]
    assert read(structs, root=tmp_path)["images"].to_pylist() == one
    assert read([[item] if item else [] for item in structs], root=tmp_path)["images"].to_pylist() == one
    paths = read(["second.jpg", None], root=tmp_path)
    assert paths["images"].to_pylist() == [[second], None]
    assert paths.column_names == ["images"]
    assert read([["second.jpg", "second.jpg"]], root=tmp_path)["images"].to_pylist() == [[second, second]]


def test_photos_that_a_camera_turned_are_upright_as_datasets_shows_them():
    exif = Image.Exif()
    exif[0x0112] = 6
    for kind in ("JPEG", "PNG", "WEBP", "TIFF"):
        Image.open(BytesIO(picture(1))).save(turned := BytesIO(), kind, exif=exif)
        expected = datasets.Image().decode_example({"bytes": turned.getvalue(), "path": None})
        assert expected.size == (30, 40)
        assert np.array_equal(np.asarray(decode(turned.getvalue())), np.asarray(expected)), kind
    assert read([turned.getvalue()])["images"].to_pylist() == [[turned.getvalue()]]


def test_images_of_each_prompt():
    table = read([picture(1), None], prompt_id=["a", "b"])
    assert has_images(table)
    assert images_of(table) == {"a": [picture(1)]}
    assert images_of(pa.table({"images": [["x.png"]], "prompt_id": ["a"]})) is None


@pytest.mark.parametrize(
    ("cells", "told"),
    [
        ([b"no image"], "data, column photo, row 6, image 1: not an image (of no format that is read)"),
        ([[picture(1), picture(1)[:500]]], "data, column photo, row 6, image 2: not an image ("),
        ([None, "gone.png"], "data, column photo, row 7, image 1: 'gone.png' could not be read (FileNotFoundError)"),
        (["https://example.org/a.png"], "nothing is fetched from the network"),
        ([[picture(1), None]], "row 6, image 2: expected bytes, a struct of bytes and path, or a path, found NoneType"),
        ([{"bytes": None, "path": None}], "row 6, image 1: expected bytes"),
        ([3], "found int"),
    ],
)
def test_what_is_no_image_is_refused_with_its_row(cells, told, tmp_path):
    with pytest.raises(UserError, match=re.escape(told)):
        read(cells, root=tmp_path)


def test_files_that_dvc_does_not_watch_are_refused(tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.png").write_bytes(picture(1))
    for watched in ([Path("photos")], [Path("photos/a.png")], [Path("other"), Path("./photos/")]):
        assert read(["photos/a.png"], root=tmp_path, watched=watched)["images"].to_pylist() == [[picture(1)]]
    with pytest.raises(UserError, match=r"row 6, image 1: photos/a\.png is in nothing that `sources` lists"):
        read(["photos/a.png"], root=tmp_path, watched=[Path("photos/b.png")])
    (tmp_path / "a.png").write_bytes(picture(1))
    (tmp_path / "photos" / "link.png").symlink_to(tmp_path / "a.png")
    with pytest.raises(UserError, match="is in nothing that `sources` lists"):
        read(["photos/link.png"], root=tmp_path, watched=[Path("photos")])


def test_columns_that_do_not_fit_are_refused():
    with pytest.raises(UserError, match="there is a column images too"):
        read([picture(1)], images=["x"])
    with pytest.raises(UserError, match="no column photo; there are pictures"):
        check_images(read([picture(1)], column="pictures"), "photo", "data")
    rows = Rows("data", pa.table({"images": pa.array([[picture(1)]], IMAGES)}), np.arange(1))
    with pytest.raises(UserError, match=r"set prompts\.images_column to images if the policy is to see them"):
        with_images(rows, None, None, ())


def test_images_that_the_policy_does_not_see_are_told(capsys):
    rows = Rows("data", pa.table({"image": [picture(1)], "photo": [picture(1)]}), np.arange(1))
    assert with_images(rows, None, None, ()) is rows
    assert "data: the policy does not see column image; set prompts.images_column: image" in capsys.readouterr().err


def test_reward_functions_get_images_and_prompts_as_trl_gives_them():
    prompts = [[{"role": "system", "content": "Look."}, *user("What?")], user("Only text.")]
    given = as_seen(read([[picture(1), picture(2)], None], prompt=prompts))
    (one, two), none = given["images"]
    assert none == []
    assert np.array_equal(np.asarray(two), np.asarray(Image.open(BytesIO(picture(2)))))
    from trl.data_utils import prepare_multimodal_messages

    assert given["prompts"] == [
        prepare_multimodal_messages(prompt, images=images)
        for prompt, images in zip(prompts, [[one, two], []], strict=True)
    ]


def test_prompts_that_hold_placeholders_are_refused():
    _, processor = make_vlm("llava")
    vision = Vision(processor, [258], "llava")
    for text, images in (("Not <image>.", []), ("Twice <image>?", [picture(1)])):
        with pytest.raises(UserError, match="its messages must not hold it"):
            vision.render([user(text)], [images])
    with pytest.raises(UserError, match="prompt 1 has images, but no user message"):
        vision.render([[{"role": "system", "content": "Hm"}]], [[picture(1)]])


def test_policy_without_sight_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"prompts\.images_column is set, but the policy \(llama\) is no vision"):
        load_vision(make_policy(tmp_path))


def test_vllm_sees_images_only_if_asked_for_by_name():
    name, reason = choose_engine("auto", images=True)
    assert name == "transformers"
    assert "by name alone" in reason
