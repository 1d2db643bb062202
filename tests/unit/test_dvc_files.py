"""DVC's own files, cut short at every length."""

from pathlib import Path

import pytest

from rloo_pipeline.dvc_files import back_up, mend
from rloo_pipeline.errors import Busy
from rloo_pipeline.layout import Layout

LOCK = (
    "schema: '2.0'\nstages:\n  prepare:\n    cmd: rloo prepare\n"
    "    outs:\n    - path: a\n      hash: md5\n      md5: 0f00a\n"
)


@pytest.fixture
def layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Layout:
    """A folder with a copy of dvc.lock, made as under DVC."""
    (tmp_path / ".dvc" / "tmp").mkdir(parents=True)
    (tmp_path / "dvc.lock").write_text(LOCK)
    monkeypatch.setenv("DVC_STAGE", "update@0001")
    back_up(Layout(tmp_path))
    return Layout(tmp_path)


@pytest.mark.parametrize("length", [0, 3, 10, LOCK.index("cmd") + 2, LOCK.index("outs") + 2])
def test_a_lock_file_that_dvc_refuses_is_replaced_by_the_copy(length: int, layout: Layout) -> None:
    lock = layout.root / "dvc.lock"
    lock.write_text(LOCK[:length])
    assert len(list(mend(layout, dry_run=True))) == 1
    assert lock.read_text() == LOCK[:length]
    assert "as it was when the last stage began" in next(mend(layout, dry_run=False))
    list(mend(layout, dry_run=False))
    assert lock.read_text() == LOCK


def test_without_a_copy_it_is_removed(layout: Layout) -> None:
    (layout.state / "dvc.lock").unlink()
    (layout.root / "dvc.lock").write_text("")
    assert "there is no copy" in "".join(mend(layout, dry_run=False))
    assert not (layout.root / "dvc.lock").exists()


@pytest.mark.parametrize("text", ["", '{"read": {"/a": [{"pi'])
def test_a_broken_rwlock_is_removed(text: str, layout: Layout) -> None:
    (layout.root / ".dvc/tmp/rwlock").write_text(text)
    assert list(mend(layout, dry_run=False)) == [".dvc/tmp/rwlock: cut short, removed"]
    assert not (layout.root / ".dvc/tmp/rwlock").exists()


def test_whole_files_stay(layout: Layout) -> None:
    (layout.root / ".dvc/tmp/rwlock").write_text("{}")
    assert list(mend(layout, dry_run=False)) == []
    assert (layout.root / "dvc.lock").read_text() == LOCK
    assert (layout.root / ".dvc/tmp/rwlock").read_text() == "{}"


def test_dvc_at_work_is_left_alone(layout: Layout) -> None:
    from dvc.lock import make_lock

    folder = layout.root / ".dvc" / "tmp"
    (layout.root / "dvc.lock").write_text("")
    with make_lock(str(folder / "lock"), tmp_dir=str(folder)), pytest.raises(Busy, match="DVC runs in"):
        list(mend(layout, dry_run=False))
    assert (layout.root / "dvc.lock").read_text() == ""


def test_no_copy_of_what_no_dvc_vouches_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DVC_STAGE", raising=False)
    (tmp_path / "dvc.lock").write_text("")
    back_up(Layout(tmp_path))
    assert not (tmp_path / ".rloo").exists()
