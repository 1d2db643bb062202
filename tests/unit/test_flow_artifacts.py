"""What Prefect shows of an iteration."""

import html
import re

from hypothesis import example, given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from flows import artifacts
from rloo_pipeline.config import load_params
from rloo_pipeline.layout import Layout
from tests.project import Project

RENDERER = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"])


@given(st.text(max_size=200))
@example("<img src=x onerror=alert(1)>")
@example("a | b\n| --- | --- |\n\n# heading\n- [link](javascript:alert(1)) `code` ***")
@example("https://evil.example &lt;b&gt; ~~x~~ ![i](u)")
@example("    indented\t\x1b[31m\u202ereversed")
def test_text_is_shown_as_it_is(text: str) -> None:
    """A cell with any text renders as one cell with that text; no element comes out of it."""
    rendered = RENDERER.render(f"| a | b |\n| --- | --- |\n| {artifacts.plain(text)} | end |")
    cells = re.findall(r"<td>(.*?)</td>", rendered, flags=re.DOTALL)
    shown = "".join(c if c.isprintable() else "\ufffd" for c in text.replace("\n", "\u21b5"))
    assert len(cells) == 2
    assert "<" not in cells[0]
    assert html.unescape(cells[0]) == shown.strip(" ")


def test_a_long_text_is_cut() -> None:
    assert artifacts.plain("a" * 5000) == "a" * 600 + r" \.\.\. \(5000 characters\)"


def test_figures(finished_project: Project) -> None:
    layout = Layout(finished_project.root)
    figures = {row["figure"]: row["value"] for row in artifacts.figures(layout, load_params(layout.params), "0002")}
    advantages = finished_project.json("metrics/advantages/0002.json")
    evaluate = finished_project.json("metrics/evaluate/0002.json")
    assert figures["train reward"] == round(advantages["reward"], 4)
    assert figures["share of groups without signal"] == round(advantages["frac_reward_zero_std"], 4)
    assert figures["win rate against the initial policy"] == round(evaluate["win_rate"], 4)
    assert figures["mean length (tokens)"] == round(
        finished_project.json("metrics/rollouts/0002.json")["completions/mean_length"], 4
    )
    stages = ("rollouts", "logprobs", "rewards", "advantages", "update", "evaluate")
    assert all(figures[f"{stage} (seconds)"] >= 0 for stage in stages)


def test_groups_are_side_by_side(finished_project: Project) -> None:
    rendered = RENDERER.render(artifacts.groups(finished_project.root, "0002"))
    assert rendered.count("<table>") == 3
    assert rendered.count("<h3>Prompt") == 3
    for sample in range(4):
        assert rendered.count(f"<th>sample {sample}</th>") == 3
    assert rendered.count("<td>completion_text</td>") == 3
    assert rendered.count("<td>advantage</td>") == 3
