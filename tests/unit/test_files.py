"""Files that are whole or absent."""

import json
import os
from pathlib import Path

import pytest

from rloo_pipeline.files import publish, write_json


def test_json_is_sorted_and_ends_in_a_newline(tmp_path: Path) -> None:
    write_json(tmp_path / "new" / "a.json", {"b": "ü", "a": 1})
    assert (tmp_path / "new" / "a.json").read_text(encoding="utf-8") == '{\n  "a": 1,\n  "b": "ü"\n}\n'


@pytest.mark.parametrize("value", [float("nan"), float("inf"), object()])
def test_a_refused_value_leaves_the_old_file(tmp_path: Path, value: object) -> None:
    write_json(tmp_path / "a.json", {"a": 1})
    with pytest.raises((ValueError, TypeError)):
        write_json(tmp_path / "a.json", {"a": value})
    assert json.loads((tmp_path / "a.json").read_text()) == {"a": 1}
    assert len(list(tmp_path.iterdir())) == 1


def test_json_never_writes_into_a_hard_link(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"a": 1})
    os.link(tmp_path / "a.json", tmp_path / "cache")
    write_json(tmp_path / "a.json", {"a": 2})
    assert json.loads((tmp_path / "cache").read_text()) == {"a": 1}


def test_publish_replaces_by_rename(tmp_path: Path) -> None:
    final, work = tmp_path / "artifacts" / "0001", tmp_path / "work" / "key"
    for folder, text in ((final, "old"), (work, "new")):
        folder.mkdir(parents=True)
        (folder / "file").write_text(text)
    (final / "gone").write_text("old")
    os.link(final / "file", tmp_path / "cache")
    (final / "file").chmod(0o444)
    publish({work: final})
    assert {path.name: path.read_text() for path in final.iterdir()} == {"file": "new"}
    assert (tmp_path / "cache").read_text() == "old"
    assert list((tmp_path / "work").iterdir()) == []
