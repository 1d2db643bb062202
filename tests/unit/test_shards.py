"""Sharded Parquet: resumed, checked, and read in order."""

import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rloo_pipeline.errors import UserError
from rloo_pipeline.manifest import read_manifest, write_manifest
from rloo_pipeline.shards import (
    read_shard,
    read_shards,
    read_table,
    shard_name,
    write_shards,
    write_shards_manifest,
    write_table,
)

SCHEMA = pa.schema([pa.field("n", pa.int32(), False), pa.field("text", pa.string())])


def part(index: int) -> pa.Table:
    return pa.table({"n": [index * 2, index * 2 + 1], "text": ["a", None]}, schema=SCHEMA)


class Maker:
    """Makes shards and remembers which."""

    def __init__(self) -> None:
        self.made: list[int] = []

    def __call__(self, index: int) -> pa.Table:
        self.made.append(index)
        return part(index)


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    """Three shards and their manifest."""
    work = tmp_path / "artifact"
    write_shards_manifest(work, write_shards(work, 3, part, SCHEMA), {"fact": 1})
    return work


def flip_byte(path: Path, text: bytes) -> None:
    content = bytearray(path.read_bytes())
    content[content.index(text)] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def swap_values(path: Path) -> None:
    """Another table, written by another program that keeps the metadata."""
    table = pq.read_table(path)
    pq.write_table(table.set_column(0, table.schema.field("n"), pa.array([8, 9], pa.int32())), path)


def test_read_in_order(artifact: Path) -> None:
    assert read_shards(artifact).to_pydict() == {"n": [0, 1, 2, 3, 4, 5], "text": ["a", None] * 3}
    assert read_shards(artifact, ["n"]).column_names == ["n"]


def test_equal_content_gives_equal_bytes(artifact: Path, tmp_path: Path) -> None:
    write_shards_manifest(tmp_path / "b", write_shards(tmp_path / "b", 3, part, SCHEMA), {"fact": 1})
    for path in artifact.iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()


def test_resume_makes_the_missing_shards_alone(tmp_path: Path) -> None:
    def interrupted(index: int) -> pa.Table:
        if index == 2:
            raise KeyboardInterrupt
        return part(index)

    with pytest.raises(KeyboardInterrupt):
        write_shards(tmp_path, 4, interrupted, SCHEMA)
    make = Maker()
    entries = write_shards(tmp_path, 4, make, SCHEMA)
    assert make.made == [2, 3]
    assert [(name, rows) for name, rows, _ in entries] == [(shard_name(index), 2) for index in range(4)]


@pytest.mark.parametrize("damage", [truncate, swap_values, lambda path: path.write_bytes(b"")])
def test_resume_makes_a_damaged_shard_again(tmp_path: Path, damage: object) -> None:
    whole = write_shards(tmp_path, 3, part, SCHEMA)
    damage(tmp_path / shard_name(1))  # type: ignore[operator]
    make = Maker()
    assert write_shards(tmp_path, 3, make, SCHEMA) == whole
    assert make.made == [1]
    assert read_table(tmp_path / shard_name(1))[0].to_pydict() == part(1).to_pydict()


def test_flipped_byte(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    write_table(path, pa.table({"text": ["the quick brown fox"]}))
    flip_byte(path, b"quick")
    with pytest.raises(UserError, match=r"t\.parquet: .*; restore it with `dvc checkout` or run"):
        read_table(path)


@pytest.mark.parametrize("damage", [truncate, swap_values, lambda path: path.unlink()])
def test_damaged_artifact(artifact: Path, damage: object) -> None:
    damage(artifact / shard_name(1))  # type: ignore[operator]
    with pytest.raises(UserError, match=r"shard-00001\.parquet: .*run the stage"):
        read_shards(artifact)


def test_a_shard_of_another_artifact(artifact: Path) -> None:
    (artifact / shard_name(0)).write_bytes((artifact / shard_name(2)).read_bytes())
    with pytest.raises(UserError, match=r"shard-00000\.parquet: its bytes are not those"):
        read_shards(artifact)


def test_a_shard_of_another_artifact_under_its_own_hash(artifact: Path) -> None:
    (artifact / shard_name(0)).write_bytes((artifact / shard_name(2)).read_bytes())
    manifest = {key: value for key, value in read_manifest(artifact).items() if key not in ("schema_version", "seal")}
    manifest["files"][shard_name(0)] = manifest["files"][shard_name(2)]
    write_manifest(artifact, **manifest)
    with pytest.raises(UserError, match=r"shard-00000\.parquet: its content is not what .*manifest\.json says"):
        read_shards(artifact)


def damaged(content: bytes) -> Iterator[bytes]:
    """A bit of every fifth byte flipped, each of the eight in turn; the file cut at every fiftieth length."""
    for index in range(0, len(content), 5):
        yield content[:index] + bytes([content[index] ^ 1 << index % 8]) + content[index + 1 :]
    for length in range(0, len(content), 50):
        yield content[:length]


def test_no_damage_goes_unnoticed(artifact: Path) -> None:
    """A flip in the footer changes no row, but the file is not what was written all the same."""
    path, manifest = artifact / shard_name(1), read_manifest(artifact)
    for content in damaged(path.read_bytes()):
        path.write_bytes(content)
        with pytest.raises(UserError, match=r"shard-00001\.parquet"):
            read_shard(artifact, manifest, 1)


def test_without_the_hash_of_the_bytes_no_damage_changes_a_row(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    write_table(path, part(1))
    whole, _ = read_table(path)
    for content in damaged(path.read_bytes()):
        path.write_bytes(content)
        try:
            assert read_table(path)[0].to_pydict() == whole.to_pydict()
        except UserError:
            continue


def test_resume_makes_a_shard_again_that_is_a_copy_of_another(tmp_path: Path) -> None:
    whole = write_shards(tmp_path, 3, part, SCHEMA)
    (tmp_path / shard_name(1)).write_bytes((tmp_path / shard_name(0)).read_bytes())
    make = Maker()
    assert write_shards(tmp_path, 3, make, SCHEMA) == whole
    assert make.made == [1]


def test_resume_makes_a_shard_again_whose_damage_changes_no_row(tmp_path: Path) -> None:
    [entry] = write_shards(tmp_path, 1, part, SCHEMA)
    path = tmp_path / shard_name(0)
    whole = path.read_bytes()
    flip_byte(path, b"parquet-cpp")  # the name of the program that wrote it
    read_table(path)
    make = Maker()
    assert write_shards(tmp_path, 1, make, SCHEMA) == [entry]
    assert make.made == [0]
    assert path.read_bytes() == whole


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "not readable as JSON"),
        ("[]", "not a JSON object"),
        ("\udcff", "not readable as JSON"),
        ('{"schema_version": 99}', "schema version 99, this package reads"),
        ('{"schema_version": 1}', "changed after it was written"),
    ],
)
def test_unusable_manifests(artifact: Path, text: str, told: str) -> None:
    (artifact / "manifest.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(UserError, match=rf"manifest\.json: {told}"):
        read_shards(artifact)


def test_an_edited_fact_is_refused(artifact: Path) -> None:
    path = artifact / "manifest.json"
    path.write_text(path.read_text().replace('"fact": 1', '"fact": 2'))
    with pytest.raises(UserError, match=r"manifest\.json: changed after it was written"):
        read_shards(artifact)


@pytest.mark.parametrize("change", [{"rows": 3}, {"files": {}}, {"files": None}, {"seal": None}, {"more": 1}])
def test_any_edited_entry_is_refused(artifact: Path, change: dict[str, object]) -> None:
    path = artifact / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(UserError, match=r"manifest\.json: changed after it was written"):
        read_shards(artifact)


def test_an_artifact_without_manifest_does_not_exist(artifact: Path) -> None:
    (artifact / "manifest.json").unlink()
    with pytest.raises(UserError, match=r"manifest\.json: no such file.*run the stage that makes it"):
        read_shards(artifact)


def test_a_failed_shard_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(pa.ArrowInvalid):
        write_shards(tmp_path, 1, lambda _: pa.table({"n": ["x"], "text": ["y"]}), SCHEMA)
    assert not list(tmp_path.rglob("*.parquet"))
