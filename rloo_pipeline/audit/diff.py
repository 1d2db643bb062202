"""What differs between two iterations, or between one iteration's making in two git revisions."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rloo_pipeline.audit.artifacts import SOURCE, stages_of
from rloo_pipeline.audit.compare import Change, ColumnDifference, compare_tables, compare_values, jsonable
from rloo_pipeline.audit.provenance import anew, output_in_place, read_provenance
from rloo_pipeline.audit.revision import Side, open_side
from rloo_pipeline.errors import UserError
from rloo_pipeline.fingerprint import MANIFEST
from rloo_pipeline.layout import Layout
from rloo_pipeline.shards import read_shards

KEYS = ("prompt_id", "sample_index")  # of one iteration; the other's number is another
Result = dict[str, Any]


def run(layout: Layout, a: str, b: str, limit: int, *, json_output: bool) -> None:
    """Print what differs between `[REVISION:]ITERATION` a and b; raises UserError if one cannot be read."""
    from rloo_pipeline.audit.diff_report import show

    with open_side(a, layout) as left, open_side(b, layout) as right:
        result = compare(left, right, limit)
    if json_output:
        print(json.dumps(jsonable(result), indent=2))
    else:
        show(result, limit)


def compare(a: Side, b: Side, limit: int) -> Result:
    """All differences as JSON values, the largest first, at most `limit` examples of each; counts are of all.

    Raises UserError if an iteration is on neither side, or if a file is not what its manifest says.
    """
    tables = {stage: (_rows(a, stage), _rows(b, stage)) for stage in ("rollouts", "rewards", "advantages")}
    provenance = [_provenance(side) for side in (a, b)]
    for side, known in zip((a, b), provenance, strict=True):
        if not known:
            raise UserError(f"{side.name}: there is no provenance of iteration {side.iteration}; has it run?")
    made = [_made(side, known) for side, known in zip((a, b), provenance, strict=True)]
    fitting = [
        {stage: record for stage, record in known.items() if record["output"] == outputs[stage]}
        for known, outputs in zip(provenance, made, strict=True)
    ]
    result: Result = {
        "a": {"name": a.name, "iteration": a.iteration, "commit": a.commit},
        "b": {"name": b.name, "iteration": b.iteration, "commit": b.commit},
        "stages": _stages(*made),
        "settings": _settings(*fitting),
        "metrics": _metrics(a, b),
        "left_out": [
            f"{stage} of {side.name}: not there"
            for stage, pair in tables.items()
            for side, table in zip((a, b), pair, strict=True)
            if table is None
        ]
        + [
            f"settings of {stage} of {side.name}: its provenance tells of another output than the one in place; "
            f"{anew(stage, side.iteration)} makes both anew"
            for side, known, fits in zip((a, b), provenance, fitting, strict=True)
            for stage in known
            if stage not in fits
        ],
    }
    rollouts = tables["rollouts"]
    if rollouts[0] is not None and rollouts[1] is not None:
        result["prompts"] = _prompts(*rollouts)
        result["completions"] = _completions(*rollouts, limit)
    result["columns"] = {
        f"{stage}.{name}": found
        for stage, (ours, theirs) in tables.items()
        if stage != "rollouts" and ours is not None and theirs is not None
        for name, found in _columns(ours, theirs, limit).items()
    }
    return result


def _rows(side: Side, stage: str) -> pa.Table | None:
    directory = side.rows(stage)
    return read_shards(directory) if (directory / MANIFEST).exists() else None


def _provenance(side: Side) -> dict[str, dict[str, Any]]:
    stages = stages_of(side.iteration)
    found = {stage: read_provenance(side.layout, stage, side.iteration, side.params) for stage in stages}
    return {stage: item for stage, item in found.items() if item is not None}


def _made(side: Side, known: Mapping[str, Any]) -> dict[str, str]:
    """The fingerprint of each stage's output: as what is in place states, or as the provenance of what is not."""
    made = {}
    for stage, record in known.items():
        try:
            made[stage] = output_in_place(side.layout, stage, side.iteration) or record["output"]
        except UserError:  # of weights, which diff does not read, or written by an earlier version
            made[stage] = record["output"]
    return made


def _stages(a: Mapping[str, str], b: Mapping[str, str]) -> Result:
    """The fingerprint of each stage's output on both sides, null where the provenance is not there."""
    stages = [*a, *(stage for stage in b if stage not in a)]
    return {stage: {"a": a.get(stage), "b": b.get(stage), "same": a.get(stage) == b.get(stage)} for stage in stages}


def _settings(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Result]:
    """Settings, versions, device and the user's files that differ, each once with the stages that it is of."""
    found: dict[str, Result] = {}
    for stage in [stage for stage in a if stage in b]:
        for change in compare_values(_made_with(a[stage]), _made_with(b[stage])):
            fact = {"name": change.name, "a": change.left, "b": change.right}
            found.setdefault(json.dumps(fact, sort_keys=True), {**fact, "stages": []})["stages"].append(stage)
    return list(found.values())


def _made_with(provenance: Mapping[str, Any]) -> dict[str, Any]:
    rest = {key: value for key, value in provenance.items() if key not in ("stage", "iteration", "inputs", "output")}
    files = {name: content for name, content in provenance["inputs"].items() if name.startswith(SOURCE)}
    return {**rest.pop("settings"), **rest, **files}


def _metrics(a: Side, b: Side) -> list[Result]:
    """The metrics that differ, the largest `scaled` first, those without a number on both sides last."""
    ours, theirs = ({stage: _read(side.layout.metrics(stage, side.iteration)) for stage in stages_of(side.iteration)}
                    for side in (a, b))  # fmt: skip
    changes = [(change, _scaled(change)) for change in compare_values(ours, theirs)]
    changes.sort(key=lambda item: (item[1] is None, -(item[1] or 0.0)))
    return [
        {"name": change.name, "a": change.left, "b": change.right, "difference": change.size, "scaled": scaled}
        for change, scaled in changes
        if change.left != {} and change.right != {}
    ]


def _scaled(change: Change) -> float | None:
    """The difference over the larger value, as it is where both are below 1: rounding shall not come first."""
    return None if change.size is None else change.size / max(1.0, abs(change.left), abs(change.right))


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except ValueError as error:
        raise UserError(f"{path}: not readable as JSON ({error}); restore it with `git checkout`") from error


def _prompts(a: pa.Table, b: pa.Table) -> Result:
    """Prompts as sets of ids, and how many of the shared ones have another text after the chat template."""
    ours, theirs = (dict(zip(side["prompt_id"].to_pylist(), side["prompt_text"].to_pylist(), strict=True))
                    for side in (a, b))  # fmt: skip
    shared = ours.keys() & theirs.keys()
    return {
        "a": len(ours),
        "b": len(theirs),
        "shared": len(shared),
        "text_differs": sum(ours[name] != theirs[name] for name in shared),
        "only_a": sorted(ours.keys() - theirs.keys()),
        "only_b": sorted(theirs.keys() - ours.keys()),
    }


def _completions(a: pa.Table, b: pa.Table, limit: int) -> Result:
    """Completions of the keys on both sides by their token ids, those that differ in most tokens first."""
    found = compare_tables(_keyed(a, ["completion_token_ids"]), _keyed(b, ["completion_token_ids"]), KEYS)
    counts = {"a": a.num_rows, "b": b.num_rows, "shared": found.rows}
    if not found.columns:
        return {**counts, "different": 0, "examples": []}
    (column,) = found.columns
    order = np.argsort(-column.values_M, kind="stable")[:limit]
    texts = [_texts(side, column.keys.take(order)) for side in (a, b)]
    examples = []
    for row, left, right in zip(order, *texts, strict=True):
        cell = column.cell(int(row))
        tokens = {"tokens_different": int(column.values_M[row]), "first_token": cell.position}
        examples.append({**dict(zip(KEYS, cell.key, strict=True)), **tokens, "a": left, "b": right})
    return {**counts, "different": column.rows, "examples": examples}


def _texts(table: pa.Table, keys: pa.Table) -> list[str]:
    """The completions' texts at these keys, in their order."""
    numbered = keys.append_column("row", pa.array(np.arange(keys.num_rows)))
    joined = numbered.join(_keyed(table, ["completion_text"]), list(KEYS), join_type="inner").sort_by("row")
    texts: list[str] = joined["completion_text"].to_pylist()
    return texts


def _keyed(table: pa.Table, columns: Sequence[str]) -> pa.Table:
    return table.select([*KEYS, *columns])


def _columns(a: pa.Table, b: pa.Table, limit: int) -> dict[str, Result]:
    """Each column of two tables: the distribution of either side's rows, and the differences of the shared rows."""
    names = [name for name in a.column_names if name in b.column_names and name not in ("iteration", *KEYS)]
    found = compare_tables(_keyed(a, names), _keyed(b, names), KEYS)
    different = {column.column: column for column in found.columns}
    return {
        name: {
            "a": _summary(a[name]),
            "b": _summary(b[name]),
            "shared": found.rows,
            **_differences(different.get(name), limit),
        }
        for name in names
    }


def _differences(column: ColumnDifference | None, limit: int) -> Result:
    if column is None:
        return {"different": 0, "largest": None, "examples": []}
    examples = []
    for cell in column.largest_first(limit):
        numbers = [value for value in (cell.left, cell.right) if isinstance(value, float)]
        difference = abs(numbers[0] - numbers[1]) if len(numbers) == 2 else None
        key = dict(zip(KEYS, cell.key, strict=True))
        examples.append({**key, "a": cell.left, "b": cell.right, "difference": difference})
    return {"different": column.rows, "largest": column.largest, "examples": examples}


def _summary(column: pa.ChunkedArray) -> Result:
    """How a column's values are spread: rows and nulls, and of numbers mean, sample deviation and quartiles."""
    summary: Result = {"rows": len(column), "null": column.null_count}
    if not pa.types.is_floating(column.type):
        return summary
    values_N = pc.drop_null(column).cast(pa.float64()).to_numpy()
    if len(values_N) == 0:
        return summary
    low, quarter, median, three_quarters, high = np.quantile(values_N, [0, 0.25, 0.5, 0.75, 1]).tolist()
    return {
        **summary,
        "mean": float(values_N.mean()),
        "std": float(values_N.std(ddof=1)) if len(values_N) > 1 else 0.0,
        **{"min": low, "p25": quarter, "median": median, "p75": three_quarters, "max": high},
    }
