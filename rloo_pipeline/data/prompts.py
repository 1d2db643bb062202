"""One dataset's table of prompts: ids, checks, system prompts, tasks."""

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rloo_pipeline.config import PromptsConfig
from rloo_pipeline.data.keep import Rows
from rloo_pipeline.data.parts import have_parts, without_parts
from rloo_pipeline.data_config import DatasetConfig
from rloo_pipeline.errors import UserError
from rloo_pipeline.schema import RESERVED_COLUMNS, reward_column

MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))


def prompt_table(rows: Rows, dataset: DatasetConfig, config: PromptsConfig, place: str) -> pa.Table:
    """prompt_id, prompt (string or list<struct<role, content>>) and every column of `rows`, in their order.

    place: train, eval, or for one of several datasets train.0 etc. Ids are the column prompt_id if there is one, else
    <place with dashes>-<row of the dataset, from 0>, which other settings of where and filter leave as they are.
    Raises UserError that names the dataset, row (counted from 1) and column.
    """
    table = rows.table
    if table.num_rows == 0:
        raise UserError(f"{rows.source}: no rows; prompts.{place} needs at least one")
    _check_names(table.column_names, config.prompt_column, rows.source)
    prompt = _prompts(rows, config.prompt_column)
    if config.system_prompt is not None or dataset.system_column is not None:
        prompt = _with_system(prompt, _system_texts(rows, dataset.system_column, config.system_prompt), rows)
    rest = {name: table[name] for name in table.column_names if name not in ("prompt_id", "prompt")}
    return pa.table({"prompt_id": _ids(rows, place), "prompt": prompt, **rest, **_task(rows, dataset.task)})


def is_conversational(prompt: pa.ChunkedArray | pa.Array) -> bool:
    """Whether prompts are messages rather than strings."""
    return bool(pa.types.is_list(prompt.type))


def _check_names(names: list[str], prompt_column: str, source: str) -> None:
    for name in names:
        if name in RESERVED_COLUMNS or name.startswith(reward_column("")):
            raise UserError(
                f"{source}: column {name} has a name that the pipeline uses itself; rename the column, as in "
                f"columns: {{old_{name.replace('/', '_')}: {name}}}"
            )
    if prompt_column not in names:
        raise UserError(
            f"{source}: no column {prompt_column}; there are {', '.join(names)}; set prompts.prompt_column "
            f"to one of them, or name it under columns, as in columns: {{{prompt_column}: <its name>}}"
        )
    if prompt_column != "prompt" and "prompt" in names:
        raise UserError(
            f"{source}: prompts.prompt_column is {prompt_column}, but there is a column prompt too, which it would "
            "take the place of; rename or drop one"
        )


def _ids(rows: Rows, place: str) -> pa.Array:
    if "prompt_id" not in rows.table.column_names:
        prefix = place.replace(".", "-")
        return pa.array([f"{prefix}-{index:06d}" for index in rows.places_N], pa.string())
    given = rows.table["prompt_id"].combine_chunks()
    if not (pa.types.is_integer(given.type) or _is_text(given.type)):
        raise UserError(f"{rows.source}: column prompt_id is of type {given.type}; ids are strings or whole numbers")
    ids = given.cast(pa.string())
    _refuse(pc.fill_null(pc.equal(ids, ""), True), rows, "prompt_id", "no id; give one or drop the column")
    if repeated := first_repeated(ids):
        first, second = (rows.places_N[index] + 1 for index in repeated)
        raise UserError(
            f"{rows.source}: rows {first} and {second} have the same prompt_id {ids[repeated[0]].as_py()!r}; ids must "
            "differ: rename one, remove it, or drop the column to have ids made"
        )
    return ids


def first_repeated(ids: pa.Array) -> tuple[int, int] | None:
    """Where the first repeated value stands and where it stood before; None if all differ."""
    first = pc.index_in(ids, value_set=ids).to_numpy(zero_copy_only=False)
    repeated = np.flatnonzero(first != np.arange(len(ids)))
    return (int(first[repeated[0]]), int(repeated[0])) if repeated.size else None


def _task(rows: Rows, task: str | None) -> dict[str, pa.Array]:
    """The column task, a string or null for each row, if there is one."""
    if "task" not in rows.table.column_names:
        return {} if task is None else {"task": pa.array([task] * rows.table.num_rows, pa.string())}
    column = rows.table["task"]
    if task is not None:
        raise UserError(
            f"{rows.source}: task is {task}, but there is a column task too, which it would take the place of; leave "
            "task out, or rename the column"
        )
    if not (_is_text(column.type) or pa.types.is_null(column.type)):
        raise UserError(
            f"{rows.source}: column task is of type {column.type}; it must hold strings, or have another name"
        )
    return {"task": column.cast(pa.string())}


def _prompts(rows: Rows, name: str) -> pa.Array:
    column = rows.table[name].combine_chunks()
    where = f"{rows.source}, column {name}"
    if _is_text(column.type):
        prompt = column.cast(pa.string())
        _refuse(_blank(prompt), rows, name, "an empty prompt; fill or remove it")
        return prompt
    if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
        return _messages(without_parts(column, rows, name) if have_parts(column) else column, rows, name)
    if pa.types.is_null(column.type):
        _refuse(column.is_null(), rows, name, "an empty prompt; fill or remove it")
    raise UserError(
        f"{where}: its type is {column.type}; a prompt is a string, or a list of messages with role and content"
    )


def _messages(column: pa.Array, rows: Rows, name: str) -> pa.Array:
    where = f"{rows.source}, column {name}"
    none = pc.fill_null(pc.equal(pc.list_value_length(column), 0), True)
    _refuse(none, rows, name, "no message; fill or remove it")
    flat, parents = pc.list_flatten(column), pc.list_parent_indices(column).to_numpy()
    if not pa.types.is_struct(flat.type) or not {"role", "content"} <= {field.name for field in flat.type}:
        raise UserError(f"{where}: its type is {column.type}; each message needs role and content")
    for field in flat.type:
        values = pc.struct_field(flat, field.name)
        if field.name not in ("role", "content"):
            _refuse_message(
                values.is_valid(), parents, rows, name, f"a message with {field.name}; only role and content"
            )
        elif _is_text(field.type) or pa.types.is_null(field.type):
            _refuse_message(values.is_null(), parents, rows, name, f"a message without {field.name}; fill or remove it")
        else:
            raise UserError(f"{where}: {field.name} of the messages is of type {field.type}; it must be a string")
    role, content = (pc.struct_field(flat, name).cast(pa.string()) for name in ("role", "content"))
    spoken = np.unique(parents[~_blank(content).to_numpy(zero_copy_only=False)])
    silent = np.isin(np.arange(len(column)), spoken, invert=True)
    _refuse(pa.array(silent), rows, name, "every message is empty; fill or remove the row")
    return _nested(role, content, np.bincount(parents, minlength=len(column)))


def _nested(role: pa.Array, content: pa.Array, counts_P: npt.NDArray[np.int64]) -> pa.Array:
    offsets = np.concatenate([[0], np.cumsum(counts_P)]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.StructArray.from_arrays([role, content], ["role", "content"]))


def _system_texts(rows: Rows, column: str | None, default: str | None) -> list[str | None]:
    """The system message of each row: null cells take the default, an empty cell is none."""
    if column is None:
        return [default] * rows.table.num_rows
    if column not in rows.table.column_names:
        raise UserError(
            f"{rows.source}: system_column: no column {column}; there are {', '.join(rows.table.column_names)}"
        )
    cells = rows.table[column]
    if not (_is_text(cells.type) or pa.types.is_null(cells.type)):
        raise UserError(f"{rows.source}: system_column {column} is of type {cells.type}; it must hold strings")
    return [default if text is None else text if text.strip() else None for text in cells.to_pylist()]


def _with_system(prompt: pa.Array, texts: list[str | None], rows: Rows) -> pa.Array:
    made = []
    for row, (value, text) in enumerate(zip(prompt.to_pylist(), texts, strict=True)):
        messages = value if is_conversational(prompt) else [{"role": "user", "content": value}]
        if text is not None and messages[0]["role"] == "system":
            raise UserError(
                f"{rows.place(row)}: has a system message of its own; leave prompts.system_prompt and system_column out"
            )
        made.append([*([] if text is None else [{"role": "system", "content": text}]), *messages])
    return pa.array(made, MESSAGES)


def _is_text(kind: pa.DataType) -> bool:
    return any(check(kind) for check in (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view))


def _blank(texts: pa.Array) -> pa.Array:
    return pc.fill_null(pc.equal(pc.utf8_trim_whitespace(texts), ""), True)


def _refuse(bad: pa.Array, rows: Rows, name: str, what: str) -> None:
    at = np.flatnonzero(bad.to_numpy(zero_copy_only=False))
    if at.size:
        more = f" (and {at.size - 1} more)" if at.size > 1 else ""
        raise UserError(f"{rows.place(at[0], name)}{more}: {what}")


def _refuse_message(bad: pa.Array, parents: npt.NDArray[np.int64], rows: Rows, name: str, what: str) -> None:
    at = np.flatnonzero(bad.to_numpy(zero_copy_only=False))
    if at.size:
        raise UserError(f"{rows.place(parents[at[0]], name)}: {what}")
