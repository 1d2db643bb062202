import io
import sys

import pytest

from rloo_pipeline import progress as module
from rloo_pipeline.progress import progress


def test_a_log_gets_plain_lines(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """One line at the end, and between only when a while has passed."""
    monkeypatch.setattr(module, "SECONDS_BETWEEN_LINES", 1e9)
    with progress("scoring", 3, "completions") as done:
        done.advance()
        done.advance(2)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("scoring: 3/3 completions (")
    assert "\r" not in line
    assert "\x1b" not in line


def test_a_line_after_each_while(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SECONDS_BETWEEN_LINES", 0.0)
    with progress("update", 2, "completions") as done:
        done.advance()
        done.advance()
    assert [line.split(" (")[0] for line in capsys.readouterr().err.splitlines()] == [
        "update: 1/2 completions",
        "update: 2/2 completions",
    ]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with progress("generating", 4, "completions") as done:
        done.advance(4)
    text = terminal.getvalue()
    assert "generating (completions)" in text
    assert "4/4" in text
    assert "\x1b[" in text
