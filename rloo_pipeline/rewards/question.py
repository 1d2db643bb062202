"""What a judge is asked about a completion."""

import json
import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import pyarrow as pa

from rloo_pipeline.data.prompts import is_conversational
from rloo_pipeline.errors import UserError
from rloo_pipeline.schema import RESERVED_COLUMNS

BRACED = re.compile(r"\{\{([^{}]*)\}\}|\{([^{}]*)\}")


def questions(template: str, rows: pa.Table, what: str) -> tuple[list[str], dict[int, str]]:
    """The template filled in for each row, in one pass, and why a row cannot be asked about, by its index.

    {prompt}, {completion} and {<column of the prompts>} are replaced, and what they bring in is left as it is;
    {{name}} stands for {name}, other braces for themselves. Raises UserError, which begins with `what`, for any other
    {name}.
    """
    columns = {name: rows[name] for name in rows.column_names if name not in RESERVED_COLUMNS}
    columns |= {"completion": rows["completion_text"], "prompt": prompt_texts(rows)}
    used = _used(template, columns, what)
    errors: dict[int, str] = {}
    filled = []
    for row, values in enumerate(_values({name: columns[name] for name in used}, rows.num_rows)):
        absent = [name for name, value in values.items() if value is None]
        if absent:
            errors[row] = (
                f"column {absent[0]} is null, so the judge cannot be asked; fill it or leave {{{absent[0]}}} out"
            )
        filled.append(BRACED.sub(partial(_replacement, values), template))
    return filled, errors


def prompt_texts(rows: pa.Table) -> list[str]:
    """Each prompt as text: of messages a single one's content, or `role: content` of all, an empty line between."""
    prompts = rows["prompt"].to_pylist()
    return [_conversation(prompt) for prompt in prompts] if is_conversational(rows["prompt"]) else prompts


def _conversation(messages: list[dict[str, str]]) -> str:
    if len(messages) == 1:
        return messages[0]["content"]
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in messages)


def _used(template: str, columns: dict[str, Any], what: str) -> list[str]:
    used = []
    for _, name in BRACED.findall(template):
        if name in columns:
            used.append(name)
        elif name.isidentifier():
            raise UserError(
                f"{what}: prompt has {{{name}}}, but there is no such column; there are {', '.join(sorted(columns))}; "
                f"write {{{{{name}}}}} if the judge shall read {{{name}}}"
            )
    return list(dict.fromkeys(used))


def _values(columns: dict[str, Any], count: int) -> Iterator[dict[str, Any]]:
    lists = {name: column if isinstance(column, list) else column.to_pylist() for name, column in columns.items()}
    for row in range(count):
        yield {name: values[row] for name, values in lists.items()}


def _replacement(values: dict[str, Any], found: re.Match[str]) -> str:
    doubled, name = found.groups()
    if doubled is not None:
        return f"{{{doubled}}}" if doubled.isidentifier() or doubled in values else found[0]
    if name not in values:
        return found[0]
    value = values[name]
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
