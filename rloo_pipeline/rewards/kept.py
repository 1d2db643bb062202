"""What scoring leaves beside the rewards among the work in progress, so that a killed stage need not score again."""

import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from rloo_pipeline.files import remove, write_json
from rloo_pipeline.reward_config import RewardBase
from rloo_pipeline.rewards.scored import Score, Scored, summed
from rloo_pipeline.shards import read_table, shard_name, write_shards

COLUMNS = {"score": pa.float64(), "error": pa.string(), "extra": pa.string(), "logged": pa.string()}


@dataclass(frozen=True)
class Counted:
    """What the metrics need that no column of the rewards tells: rows with an error by component, and logged means."""

    errors: Mapping[str, int]
    logged: Mapping[str, float]


@dataclass(frozen=True)
class Shards:
    """Completions joined with their prompts, in `count` shards; `rows(index)` reads one."""

    count: int
    rows: Callable[[int], pa.Table]


class Kept:
    """Scores of components by shard, and notes of the shards of rewards."""

    def __init__(self, work: Path) -> None:
        self.scores = work.with_name(f"{work.name}.scores")
        self.notes = work.with_name(f"{work.name}.notes")

    def write(self, part: int, configs: Sequence[RewardBase], shards: Shards, score: Score) -> None:
        """Score each shard that is not there yet by the components that are scored together."""
        names = [config.name for config in configs]
        schema = pa.schema([(f"{kind}/{name}", of) for name in names for kind, of in COLUMNS.items()])

        def make(index: int) -> pa.Table:
            return _table(score(shards.rows(index))).select(schema.names)

        write_shards(self.scores / str(part), shards.count, make, schema)

    def read(self, parts: Sequence[Sequence[RewardBase]], index: int) -> dict[str, Scored]:
        """The scores of one shard that `write` wrote."""
        found: dict[str, Scored] = {}
        for part, configs in enumerate(parts):
            table, _ = read_table(self.scores / str(part) / shard_name(index))
            found |= {config.name: _scored(table, config.name) for config in configs}
        return found

    def note(self, index: int, scored: Mapping[str, Scored]) -> None:
        """Keep the counts of errors and what functions logged of one shard, where there is any."""
        errors = {name: len(found.errors) for name, found in scored.items() if found.errors}
        logged = [found.logged for found in scored.values() if found.logged]
        path = self.notes / f"{index:05d}.json"
        if errors or logged:
            write_json(path, {"errors": errors, "logged": summed(logged)})
        else:
            remove(path)

    def counted(self) -> Counted:
        """What was noted of all shards."""
        notes = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(self.notes.glob("*.json"))]
        errors: dict[str, int] = defaultdict(int)
        for note in notes:
            for name, number in note["errors"].items():
                errors[name] += number
        sums = summed([note["logged"] for note in notes])
        return Counted(errors, {name: total / rows for name, (total, rows) in sums.items()})


def _table(scored: Mapping[str, Scored]) -> pa.Table:
    columns: dict[str, pa.Array] = {}
    for name, found in scored.items():
        rows = range(len(found.scores_N))
        columns |= {
            f"score/{name}": pa.array(found.scores_N, from_pandas=True),
            f"error/{name}": pa.array([found.errors.get(row) for row in rows], pa.string()),
            f"extra/{name}": pa.array([_json(found.extra.get(row)) for row in rows], pa.string()),
            # Once, in the first row: it is of the shard.
            f"logged/{name}": pa.array([_json(None if row else found.logged) for row in rows], pa.string()),
        }
    return pa.table(columns)


def _json(value: Mapping[str, Any] | None) -> str | None:
    return None if value is None else json.dumps(value)


def _scored(table: pa.Table, name: str) -> Scored:
    errors, extra = (table[f"{kind}/{name}"].to_pylist() for kind in ("error", "extra"))
    return Scored(
        table[f"score/{name}"].to_numpy().astype(np.float64),
        {row: reason for row, reason in enumerate(errors) if reason is not None},
        {row: json.loads(text) for row, text in enumerate(extra) if text is not None},
        json.loads(table[f"logged/{name}"][0].as_py()),
    )
