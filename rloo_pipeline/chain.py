"""The chain of iterations in params.yaml, lengthened or shortened in place."""

from pathlib import Path
from typing import Any

from rloo_pipeline.config import Params, load_params, parse_params
from rloo_pipeline.errors import UserError
from rloo_pipeline.layout import INITIAL


def before(params: Params, iteration: str) -> list[str]:
    """The iterations that led to this one, the first first."""
    found: list[str] = []
    while (iteration := params.iterations[iteration].previous) != INITIAL:
        found.insert(0, iteration)
    return found


def set_length(path: Path, count: int) -> Params:
    """Make the chain `count` iterations long, comments and finished iterations kept; raises UserError if it branches.

    A new iteration continues the last one and keeps its reference.
    """
    from ruamel.yaml import YAML

    if not 0 <= count <= 9999:
        raise UserError(f"{count} iterations: the chain can have 0 to 9999")
    params = load_params(path)
    expected = [f"{number:04d}" for number in range(1, len(params.iterations) + 1)]
    if list(params.iterations) != expected:
        raise UserError(f"{path}: iterations are not 0001, 0002, ... in order; edit the chain by hand")
    reference = params.iterations[expected[-1]].reference if expected else INITIAL
    text = path.read_text(encoding="utf-8")
    edited = _edit(text, YAML(typ="safe", pure=True).compose(text), count, reference, path)
    changed = parse_params(YAML(typ="safe").load(edited), path)
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(edited, encoding="utf-8")
    temporary.replace(path)
    return changed


def _edit(text: str, document: Any, count: int, reference: str, path: Path) -> str:
    """The text with whole lines of the chain added or removed, every other line as it was.

    A YAML round trip would move a comment behind the last iteration and indent lists its own way.
    """
    key, chain = next((key, value) for key, value in document.value if key.value == "iterations")
    items, lines = chain.value, text.split("\n")
    if items and chain.flow_style:
        raise UserError(f"{path}: iterations stand in one pair of braces; write each on a line of its own")
    indent = " " * (items[0][0].start_mark.column if items else key.start_mark.column + 2)
    new = [
        f'{indent}"{number:04d}": {{previous: "{number - 1:04d}", reference: "{reference}"}}'
        for number in range(len(items) + 1, count + 1)
    ]
    if count < len(items):
        del lines[items[count][0].start_mark.line : _last_line(items[-1][1]) + 1]
        if count == 0:
            line = lines[key.start_mark.line]
            after = line.index(":", key.end_mark.column) + 1
            lines[key.start_mark.line] = f"{line[:after]} {{}}{line[after:]}"
    elif new and items:
        after = _last_line(items[-1][1]) + 1
        lines[after:after] = new
    elif new:
        line, start, end = chain.start_mark.line, chain.start_mark.column, chain.end_mark.column
        lines[line : line + 1] = [(lines[line][:start].rstrip() + lines[line][end:]).rstrip(), *new]
    return "\n".join(lines)


def _last_line(node: Any) -> int:
    """The line on which a mapping or scalar ends; that of a block mapping is its last value's."""
    if isinstance(node.value, list) and node.value and not node.flow_style:
        return _last_line(node.value[-1][1])
    return int(node.end_mark.line)
