"""Whether the prompts can be used: columns, tasks, chat template, lengths, and how many there are."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rloo_pipeline.check.report import Level, Report
from rloo_pipeline.config import Params, SamplingConfig
from rloo_pipeline.data.filter import fits, prompt_limit
from rloo_pipeline.data.prompts import is_conversational
from rloo_pipeline.data.select import select_prompts
from rloo_pipeline.data.splits import Split
from rloo_pipeline.stages.dataset_completions import texts_of
from rloo_pipeline.stages.prepare import shared

AT_MOST = 1000  # prompts of a split that are rendered, spread evenly over it
SHOWN = 1000  # characters of the example
Read = Callable[[pa.Table], tuple[list[str], list[list[int]]]]


@dataclass(frozen=True)
class Rendered:
    """Some prompts of a split as the policy will see them."""

    rows_P: npt.NDArray[np.int64]  # which ones, of the whole table
    texts: list[str]
    token_ids: list[list[int]]

    @property
    def lengths_P(self) -> npt.NDArray[np.int64]:
        """Tokens of each."""
        return np.array([len(ids) for ids in self.token_ids], np.int64)

    def kept(self, kept_P: npt.NDArray[np.bool_]) -> "Rendered":
        """Those of them that are kept."""
        rows = np.flatnonzero(kept_P).tolist()
        return Rendered(self.rows_P[kept_P], [self.texts[row] for row in rows], [self.token_ids[row] for row in rows])


def contents(tables: dict[Split, pa.Table], params: Params, report: Report) -> None:
    """Counts, columns, tasks that rewards are routed by, and prompts enough for an iteration."""
    for split, table in tables.items():
        kind = "messages" if is_conversational(table["prompt"]) else "strings"
        columns = ", ".join(name for name in table.column_names if name not in ("prompt", "prompt_id"))
        report.ok(f"prompts.{split}", f"{table.num_rows} prompts ({kind}), columns {columns or 'none'}")
    if len(tables) == 2 and (both := shared(tables)):
        text = f"{both} of {tables['eval'].num_rows} prompts are among prompts.train too, so they are not held out"
        report.warning("prompts.eval", text)
    tasks(tables, params, report)
    column = params.evaluate.opponent_column
    if column is not None and "eval" in tables:
        found = report.attempt("evaluate.opponent_column", texts_of, tables["eval"], column)
        if found is not None:
            level: Level = "ok" if found else "error"
            report.tell(
                level,
                "evaluate.opponent_column",
                f"{len(found)} of {tables['eval'].num_rows} prompts have a completion",
            )


def tasks(tables: dict[Split, pa.Table], params: Params, report: Report) -> None:
    """Every task that a reward names is there, and every row has a reward that applies to it."""
    wanted = {config.name: config.tasks for config in params.rewards if config.tasks is not None}
    if not wanted:
        return
    for split, table in tables.items():
        if "task" not in table.column_names:
            report.error(f"prompts.{split}", f"no column task, which the rewards {', '.join(wanted)} are routed by")
            continue
        there = table["task"].cast(pa.string())
        for name, names in wanted.items():
            for task in sorted(set(names) - set(there.to_pylist())):
                level: Level = "error" if split == "train" else "warning"
                report.tell(level, f"rewards, {name}", f"no row of prompts.{split} has the task {task}")
        if len(wanted) == len(params.rewards):
            covered = sorted({task for names in wanted.values() for task in names})
            left = table.num_rows - pc.sum(pc.is_in(there, value_set=pa.array(covered))).as_py()
            if left:
                report.error(
                    f"prompts.{split}",
                    f"{left} of {table.num_rows} prompts have a task that no reward applies to: their completions "
                    "would be sampled and left out; leave the prompts out with where, or give them a reward",
                )


def render(split: Split, table: pa.Table, read: Read, report: Report) -> Rendered | None:
    """Some prompts by the chat template; the first is shown."""
    rows_P = np.unique(np.linspace(0, table.num_rows - 1, min(AT_MOST, table.num_rows)).astype(np.int64))
    done = report.attempt(f"prompts.{split}", read, table.take(pa.array(rows_P)))
    if done is None:
        return None
    rendered = Rendered(rows_P, *done)
    if split == "train":
        text = rendered.texts[0]
        more = f"\n({len(text) - SHOWN} more characters)" if len(text) > SHOWN else ""
        report.ok("example", f"the first prompt as the policy sees it\n{text[:SHOWN]}{more}")
    return rendered


def twice_begun(rendered: Rendered, bos: int | None, report: Report) -> None:
    """A BOS of the text and one of the tokenizer."""
    if bos is not None and rendered.token_ids[0][:2] == [bos, bos]:
        report.warning("prompts", "a prompt begins with two BOS tokens; take the one in its text away")


def lengths(
    split: Split,
    table: pa.Table,
    rendered: Rendered,
    context: int,
    config: SamplingConfig,
    params: Params,
    report: Report,
) -> tuple[Rendered, pa.Table]:
    """How long the prompts are; returns what was looked at, and the table, without those that are too long."""
    where = f"prompts.{split}"
    lengths_P = rendered.lengths_P
    of = f"{len(lengths_P)} looked at of {table.num_rows}" if len(lengths_P) < table.num_rows else f"{len(lengths_P)}"
    low, middle, high = (int(np.quantile(lengths_P, share, method="nearest")) for share in (0, 0.5, 1))
    limit = report.attempt(where, prompt_limit, context, config.max_tokens, params.prompts.max_prompt_tokens)
    if limit is None:
        return rendered, table
    told = f"tokens of a prompt ({of}): {low} to {high}, median {middle}; {limit.origin}"
    found = report.attempt(where, fits, lengths_P.tolist(), limit)
    if found is None:
        return rendered, table
    kept_P, reasons = found
    if reasons:
        report.warning(where, f"{told}: {len(reasons)} of these are left out as too long")
    else:
        report.ok(where, told)
    out = rendered.rows_P[~kept_P]
    return rendered.kept(kept_P), table.filter(pa.array(np.isin(np.arange(table.num_rows), out, invert=True)))


def enough(train: pa.Table, params: Params, report: Report) -> None:
    """An iteration's prompts are all different, so there must be as many."""
    drawn, asked = params.rollouts.prompts_drawn, params.rollouts.prompts_asked
    where = "rollouts.prompts_per_iteration"
    if report.attempt(where, select_prompts, train, drawn, 1, params.seed, asked) is not None:
        epochs = drawn * len(params.iterations) / train.num_rows
        report.ok(where, f"{asked} of {train.num_rows} prompts; the chain takes each {epochs:.2g} times on average")
