"""What Prefect shows of an iteration: its figures, and a few groups with their completions side by side."""

import json
import re
from pathlib import Path
from typing import Any

from rloo_pipeline import audit
from rloo_pipeline.audit import views
from rloo_pipeline.config import Params
from rloo_pipeline.history import collect
from rloo_pipeline.layout import STAGES, Layout

FIGURES = {
    "train reward": "advantages/reward",
    "held-out reward": "evaluate/reward",
    "held-out reward, 95% from": "evaluate/reward_low",
    "held-out reward, 95% to": "evaluate/reward_high",
    "win rate against the initial policy": "evaluate/win_rate",
    "KL of the rollouts to the reference (nats)": "advantages/kl",
    "KL of the held-out completions to the reference (nats)": "evaluate/kl",
    "share of groups without signal": "advantages/frac_reward_zero_std",
    "mean length (tokens)": "rollouts/completions/mean_length",
    "share of completions cut off": "rollouts/completions/clipped_ratio",
}
GROUPS = 3
CHARACTERS = 600
PUNCTUATION = re.compile(r"[!-/:-@\[-`{-~]")


def figures(layout: Layout, params: Params, iteration: str) -> list[dict[str, Any]]:
    """Rows of figure and value: rewards, KL (nats), lengths (tokens), and the seconds of each stage."""
    row = next(row for row in collect(layout, params) if row["iteration"] == iteration)
    rows = [{"figure": title, "value": round(row[key], 4)} for title, key in FIGURES.items() if key in row]
    for stage in STAGES:
        path = layout.timings(stage, iteration)
        if path.exists():
            seconds = json.loads(path.read_text(encoding="utf-8"))["seconds"]
            rows.append({"figure": f"{stage} (seconds)", "value": round(seconds, 1)})
    return rows


def groups(root: Path, iteration: str) -> str:
    """Markdown of the groups with the lowest, the middle and the highest mean reward, one column a completion."""
    table = audit.load(iteration, root)
    found = sorted(views.groups(table).to_pylist(), key=lambda group: (group["reward_mean"] or 0.0, group["prompt_id"]))
    places = sorted({round(part * (len(found) - 1) / (GROUPS - 1)) for part in range(GROUPS)})
    return "\n\n".join(_group(found[place], views.group(table, found[place]["prompt_id"])) for place in places)


def _group(group: dict[str, Any], completions: Any) -> str:
    rows = completions.to_pylist()
    lines = [
        f"### Prompt {plain(group['prompt_id'])}",
        plain(group["prompt_text"].strip()),
        "",
        "| |" + "".join(f" sample {row['sample_index']} |" for row in rows),
        "| --- |" + " --- |" * len(rows),
    ]
    for name in completions.column_names[1:]:
        if any(row[name] is not None for row in rows):
            lines.append(f"| {plain(name)} |" + "".join(f" {_cell(row[name])} |" for row in rows))
    return "\n".join(lines)


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else plain(str(value))


def plain(text: str) -> str:
    """Any text as Markdown that shows just this text: a model's output must not become a link, a table or HTML.

    A backslash stands before all punctuation. What has no glyph of its own shows as U+FFFD, a new line as an arrow.
    """
    if len(text) > CHARACTERS:
        text = f"{text[:CHARACTERS]} ... ({len(text)} characters)"
    text = "".join(character if character.isprintable() else "\ufffd" for character in text.replace("\n", "\u21b5"))
    return PUNCTUATION.sub(r"\\\g<0>", text)
