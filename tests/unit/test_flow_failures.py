"""Which failures are tried again, and what a server that is away does."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import httpx
import pytest
from prefect.states import Failed

from flows import dvc, node, training
from rloo_pipeline.errors import Busy, UserError


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "again"),
    [
        (dvc.CanPass("out of memory"), True),
        (Busy("another stage runs"), True),
        (httpx.ConnectError("the server is away"), True),
        (caused(RuntimeError("no slot"), httpx.ReadTimeout("the server is slow")), True),
        (dvc.Failed("rewards@0001: reward.py has no missing"), False),
        (UserError("no such key"), False),
        (ValueError("a mistake in the code"), False),
    ],
)
def test_what_is_tried_again(error: Exception, again: bool) -> None:
    state = Failed(data=error)
    assert training.can_pass(training.stage_task, SimpleNamespace(), state) is again  # type: ignore[arg-type]


def test_tasks_of_a_run_try_again() -> None:
    for task in (training.params_task, training.stage_task, training.push_task, training.show_task):
        assert (task.retries, task.retry_condition_fn) == (3, training.can_pass)


def test_no_server_is_a_user_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from prefect.settings import PREFECT_API_URL, temporary_settings

    monkeypatch.setattr(training, "SECONDS_FOR_A_SERVER", 0)
    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}), pytest.raises(training.typer.Exit) as ended:
        training.main()
    assert ended.value.exit_code == 2
    assert "error: no Prefect server answers at http://127.0.0.1:9/api" in capsys.readouterr().err


def test_a_value_that_is_no_yaml_is_a_user_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(training.typer.Exit) as ended:
        training.main(set_=["advantages.beta=[1"])
    assert ended.value.exit_code == 2
    assert "error: advantages.beta=[1: the value is not readable as YAML" in capsys.readouterr().err


@contextmanager
def slot_of_a_server_that_goes_away(*_names: object, **_options: object) -> Iterator[None]:
    yield
    raise httpx.ConnectError("connection refused")


def test_a_server_away_at_the_release_does_not_fail_the_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "_has_room", lambda: True)
    monkeypatch.setattr(node, "concurrency", slot_of_a_server_that_goes_away)
    with node.slot():
        pass
    with pytest.raises(dvc.Failed, match="the stage's own"), node.slot():
        raise dvc.Failed("the stage's own")
