import errno
import shutil
from collections import namedtuple

import numpy as np
import pytest
from safetensors.numpy import save_file

from rloo_pipeline.disk import check_space, parameters, refusals_told
from rloo_pipeline.errors import UserError
from rloo_pipeline.layout import Layout
from tests.tiny import make_model

GIB = 2**30


@pytest.fixture
def free(monkeypatch):
    """Sets how many bytes are free."""

    def set_free(amount):
        usage = namedtuple("usage", "total used free")
        monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage(2 * amount, amount, amount))

    return set_free


def test_parameters_by_hand(tmp_path):
    save_file({"a": np.zeros((3, 4), np.float32), "scalar": np.zeros((), np.float32)}, tmp_path / "one.safetensors")
    save_file({"b": np.zeros((5,), np.float16)}, tmp_path / "two.safetensors")
    (tmp_path / "other.bin").write_bytes(b"0" * 100)
    assert parameters(tmp_path) == 12 + 1 + 5


def test_parameters_of_the_tiny_model(tmp_path):
    """Embedding 258 x 64 (tied); per layer q and o 64 x 64, k and v 32 x 64, three of 96 x 64, two norms; a norm."""
    make_model().save_pretrained(tmp_path)
    layer = 2 * 64 * 64 + 2 * 32 * 64 + 3 * 96 * 64 + 2 * 64
    assert parameters(tmp_path) == 258 * 64 + 2 * layer + 64


@pytest.fixture
def model(tmp_path):
    """2^20 parameters: 12 MiB a checkpoint."""
    save_file({"a": np.zeros((1024, 1024), np.float16)}, tmp_path / "model.safetensors")
    return tmp_path


def test_a_run_that_fits_is_told(model, free, capsys):
    free(12 * 2**20 * 256)
    check_space(Layout(model), model, 256)
    assert "256 iterations will write about 3.0 GiB, 3.0 GiB are free" in capsys.readouterr().err


def test_a_run_that_does_not_fit_is_refused_with_the_figures(model, free):
    free(12 * 2**20 * 256 - 1)
    with pytest.raises(UserError) as caught:
        check_space(Layout(model), model, 256)
    message = str(caught.value)
    for part in ("256 iterations", "3.0 GiB of checkpoints", "0.01 GiB each", "3.0 GiB free", str(model.resolve()),
                 "rloo iterations N"):  # fmt: skip
        assert part in message


def test_no_iteration_always_fits(model, free, capsys):
    free(0)
    check_space(Layout(model), model, 0)
    assert "0 iterations will write about 0.0 GiB" in capsys.readouterr().err


def of_safetensors():
    from safetensors import SafetensorError

    raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")


def of_a_copied_tree():
    raise shutil.Error([("a", "b", "[Errno 28] No space left on device: 'b'")])


def of_the_system():
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("fail", [of_safetensors, of_a_copied_tree, of_the_system])
def test_a_full_disk_is_told_whoever_meets_it(fail, free, tmp_path):
    free(3 * 2**19)
    with pytest.raises(UserError) as caught, refusals_told(tmp_path / "not" / "there.bin"):
        fail()
    assert str(caught.value).startswith(f"{tmp_path}/not/there.bin: the disk is full (1.5 MiB free); make room")


@pytest.mark.parametrize("number", [errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EXDEV, errno.EIO])
def test_a_refusal_names_the_file_that_the_system_names(number, tmp_path):
    told = rf"^{tmp_path}/own: .*; .*, then run the command again$"
    with pytest.raises(UserError, match=told), refusals_told(tmp_path):
        raise OSError(number, "refused", str(tmp_path / "own"))


@pytest.mark.parametrize("error", [FileNotFoundError(errno.ENOENT, "x"), OSError("x"), ValueError("[Errno 28]")])
def test_other_errors_pass(error, tmp_path):
    with pytest.raises(type(error)) as caught, refusals_told(tmp_path):
        raise error
    assert caught.value is error
