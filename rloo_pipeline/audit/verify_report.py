"""How a replay ended, for people and for machines."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa

from rloo_pipeline.audit.compare import Cell, Change, Comparison, compare_values, jsonable, printable, shown
from rloo_pipeline.audit.tensors import PartDifference, compare_parts

Status = Literal["identical", "differs", "unchecked", "failed"]
WORDS = {"unchecked": "cannot be checked", "failed": "cannot be replayed"}
TOLD = 5  # differences of one artifact that people are told of


@dataclass(frozen=True)
class Difference:
    """Something that the stored and the replayed output of a stage do not share.

    artifact: the output's name, or metrics. told: in words; facts: as JSON values.
    """

    artifact: str
    name: str
    told: str
    facts: Mapping[str, Any]


@dataclass
class Outcome:
    """How the replay of one stage ended.

    unchecked: something is not there to replay or to compare with; failed: everything is there and it cannot be
    replayed. changed: settings that params.yaml gives another value now (left: made with); conditions: what else is
    not as recorded (left: recorded).
    """

    stage: str
    iteration: str
    status: Status = "identical"
    reason: str = ""
    rows: int = 0
    differences: list[Difference] = field(default_factory=list)
    changed: list[Change] = field(default_factory=list)
    conditions: list[Change] = field(default_factory=list)


def of_table(artifact: str, found: Comparison) -> list[Difference]:
    """The differences of two tables (left: stored): rows, columns, then values, the first row's column first."""
    differences = []
    for side, rows in (("stored", found.only_left), ("replayed", found.only_right)):
        if rows.num_rows:
            key = {name: rows[name][0].as_py() for name in rows.column_names}
            told = f"{rows.num_rows} rows are only in the {side} artifact, the first at {_place(key)}"
            differences.append(Difference(artifact, "rows", told, {"kind": "rows", "only": side, "key": key}))
    for side, names in (("stored", found.columns_only_left), ("replayed", found.columns_only_right)):
        for name in names:
            told = f"{name}: only in the {side} artifact"
            differences.append(Difference(artifact, name, told, {"kind": "column", "only": side}))
    for name, types in found.retyped.items():
        told = f"{name}: stored as {types[0]}, replayed as {types[1]}"
        differences.append(Difference(artifact, name, told, {"kind": "type", "stored": types[0], "replayed": types[1]}))
    leading = found.first.column if found.first else None
    for column in sorted(found.columns, key=lambda column: column.column != leading):
        cell = column.cell(0)
        first = _first(cell, column.keys)
        told = f"{column.column}: {column.rows} of {found.rows} rows differ"
        told += f" in {column.values} values" if column.values != column.rows else ""
        told += f", by at most {column.largest:.3g}" if column.largest is not None else ""
        told += f"; first at {_place(first['key'])}{_position(cell)}: {_both(cell.left, cell.right, cell.position)}"
        counts = {"rows": column.rows, "of_rows": found.rows, "values": column.values, "largest": column.largest}
        differences.append(Difference(artifact, column.column, told, {"kind": "values", **counts, "first": first}))
    return differences


def of_parts(artifact: str, stored: Path, replayed: Path) -> list[Difference]:
    """The tensors and files that differ, the largest difference first."""
    return [Difference(artifact, part.name, _told(part), _facts(part)) for part in compare_parts(stored, replayed)]


def of_metrics(stored: Mapping[str, Any], replayed: Mapping[str, Any]) -> list[Difference]:
    """The metrics that differ."""
    return [
        Difference(
            "metrics",
            change.name,
            f"{change.name}: {_change(change, 'stored', 'replayed')}",
            {"kind": "metric", "stored": change.left, "replayed": change.right},
        )
        for change in compare_values(stored, replayed)
    ]


def of_manifest(artifact: str) -> Difference:
    """Rows are equal and fingerprints are not: the order of rows, the cut into shards or the manifest's facts."""
    told = "every row is equal, but not their order, the shards they stand in, or what the manifest says of them"
    return Difference(artifact, "manifest", told, {"kind": "manifest"})


def lines(outcome: Outcome) -> list[str]:
    """One line on the stage; below it what differs and why that may be."""
    title = f"{outcome.stage} {outcome.iteration}: {WORDS.get(outcome.status, outcome.status)}"
    if outcome.reason:
        title += f": {outcome.reason}"
    elif outcome.status == "identical" and outcome.rows:
        title += f" ({outcome.rows} rows)"
    found = [title]
    for artifact, group in groupby(outcome.differences, lambda difference: difference.artifact):
        items = list(group)
        found += [f"  {artifact}: {item.told}" for item in items[:TOLD]]
        if len(items) > TOLD:
            found.append(f"  {artifact}: and {len(items) - TOLD} more that differ")
    if outcome.changed:
        told = "; ".join(f"{change.name} {_change(change, 'was', 'is')}" for change in outcome.changed)
        found.append(f"  params.yaml has changed since, replayed with what made it: {told}")
    if outcome.conditions:
        told = "; ".join(f"{change.name} {_change(change, 'was', 'is')}" for change in outcome.conditions)
        found.append(f"  conditions have changed since, which can change results: {told}")
    return [printable(line) for line in found]


def as_json(outcome: Outcome) -> dict[str, Any]:
    """The outcome as strict JSON values."""
    differences = [{"artifact": item.artifact, "name": item.name, **item.facts} for item in outcome.differences]
    value = {
        "stage": outcome.stage,
        "iteration": outcome.iteration,
        "status": outcome.status,
        "reason": outcome.reason,
        "rows": outcome.rows,
        "differences": differences,
        "changed": [{"name": item.name, "made_with": item.left, "now": item.right} for item in outcome.changed],
        "conditions": [{"name": item.name, "recorded": item.left, "now": item.right} for item in outcome.conditions],
    }
    return {key: jsonable(item) for key, item in value.items()}


def _first(cell: Cell, keys: pa.Table) -> dict[str, Any]:
    key = dict(zip(keys.column_names, cell.key, strict=True))
    return {"key": key, "position": cell.position, "stored": cell.left, "replayed": cell.right}


def _place(key: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in key.items())


def _position(cell: Cell) -> str:
    if cell.position is None:
        return ""
    return f", {'character' if isinstance(cell.left, str) else 'position'} {cell.position}"


def _both(stored: Any, replayed: Any, position: int | None = None) -> str:
    return f"stored {shown(stored, position)}, replayed {shown(replayed, position)}"


def _change(change: Change, left: str, right: str) -> str:
    values: Sequence[str] = (shown(change.left), shown(change.right))
    if change.side != "both":
        values = (values[0], "absent") if change.side == "left" else ("absent", values[1])
    return f"{left} {values[0]}, {right} {values[1]}"


def _told(part: PartDifference) -> str:
    if part.side != "both":
        return f"{part.name}: only in the {'stored' if part.side == 'left' else 'replayed'} artifact"
    if part.values is None:
        return f"{part.name}: {'bytes differ' if part.name.startswith('file:') else 'shape or type differs'}"
    most = "" if part.largest is None else f", by at most {part.largest:.3g}"
    return f"{part.name}: {part.values} of {part.size} numbers differ{most}"


def _facts(part: PartDifference) -> dict[str, Any]:
    if part.side != "both":
        return {"kind": "part", "only": "stored" if part.side == "left" else "replayed"}
    return {"kind": "part", "values": part.values, "size": part.size, "largest": part.largest}
