"""Files that are whole or absent."""

import json
import os
from pathlib import Path

import pytest

from rloo_pipeline.files import publish, remove, write_json


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


def test_publish_clears_every_old_directory_before_anything_new_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused at the first new name: the old record stands alone, and nothing of the new run."""
    for name in ("model", "state"):
        (tmp_path / "final" / name).mkdir(parents=True)
        (tmp_path / "work" / name).mkdir(parents=True)
    (tmp_path / "final" / "metrics.json").write_text("old")
    (tmp_path / "work" / "metrics.json").write_text("new")

    def refuse(path: Path, _: Path) -> None:
        raise OSError(f"no room for {path.name}")

    names = ("metrics.json", "state", "model")
    outputs = {tmp_path / "work" / name: tmp_path / "final" / name for name in names}
    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", refuse)
        with pytest.raises(OSError, match=r"no room for metrics\.json"):
            publish(outputs)
    assert [path.name for path in (tmp_path / "final").iterdir()] == ["metrics.json"]
    publish(outputs)
    assert sorted(path.name for path in (tmp_path / "final").iterdir()) == ["metrics.json", "model", "state"]
    assert (tmp_path / "final" / "metrics.json").read_text() == "new"


def test_everything_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files first, then the directories that name them; a power cut after the rename leaves no empty file."""
    (tmp_path / "work" / "model").mkdir(parents=True)
    (tmp_path / "work" / "model" / "weights").write_text("w")
    synced: list[tuple[Path, bool]] = []

    def note(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        synced.append((path.relative_to(tmp_path), (tmp_path / "final").exists()))

    monkeypatch.setattr(os, "fsync", note)
    publish({tmp_path / "work": tmp_path / "final"})
    before = [path for path, named in synced if not named]
    assert before == [Path("work/model/weights"), Path("work/model"), Path("work")]
    assert synced[-1] == (Path(), True)


def test_staging_keeps_temporary_files_out_of_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Path] = []
    monkeypatch.setattr(os, "fsync", lambda _: seen.extend(path for path in tmp_path.rglob("*") if path.is_file()))
    write_json(tmp_path / "watched" / "a.json", {"a": 1}, staging=tmp_path / "state")
    assert seen == [tmp_path / "state" / ".a.json.tmp"]
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["a.json"]


def test_remove_takes_files_directories_and_what_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "link").symlink_to("kept")
    (tmp_path / "folder" / "below").mkdir(parents=True)
    (tmp_path / "file").touch()
    for name in ("link", "folder", "file", "absent"):
        remove(tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
