"""What a flow run changes in params.yaml before it starts: single values, and the length of the chain."""

import re
from collections.abc import Callable, Mapping, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

from rloo_pipeline.chain import set_length
from rloo_pipeline.config import Params, load_params, parse_params
from rloo_pipeline.errors import UserError
from rloo_pipeline.fingerprint import MANIFEST
from rloo_pipeline.layout import Layout
from rloo_pipeline.process import exclusive
from rloo_pipeline.tracking.secrets import hide


def change(
    layout: Layout, overrides: Mapping[str, Any], iterations: int | None, extend_by: int, say: Callable[[str], None]
) -> Params:
    """Write overrides and chain length into params.yaml, comments kept; returns the params as they are then.

    overrides: values by dotted path, as in advantages.beta or rewards.0.weight. iterations: how many the chain shall
    have. extend_by: how many to add, but only to a finished chain: one that is not finished is finished first, so that
    a run that was cut short can be started again as it was. Says what changed. Raises UserError, before anything is
    written, if the result is not valid, and Busy if a stage runs in the project.
    """
    if extend_by < 0:
        raise UserError(f"extend_by is {extend_by}, but it can only add; give iterations to shorten the chain")
    if iterations is not None and extend_by:
        raise UserError("iterations and extend_by are both given; give one")
    with exclusive(layout, "the flow"):
        params = override(layout.params, overrides) if overrides else load_params(layout.params)
        before = len(params.iterations)
        if extend_by and _finished(layout, params):
            iterations = before + extend_by
        if iterations is not None and iterations != before:
            params = set_length(layout.params, iterations)
    changed = "" if len(params.iterations) == before else f", before {before}"
    shown = ", ".join(f"{path}={hide(path, value)}" for path, value in overrides.items())
    say(f"params.yaml: {len(params.iterations)} iterations{changed}; set: {shown or 'nothing'}")
    return params


def override(path: Path, overrides: Mapping[str, Any]) -> Params:
    """Set values in params.yaml by dotted path, comments kept; raises UserError, nothing written, if one is wrong."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    try:
        text = path.read_text(encoding="utf-8")
        YAML(typ="safe").load(text)
    except (FileNotFoundError, UnicodeDecodeError, YAMLError):
        load_params(path)  # tells what is wrong with the file
        raise
    mapping, offset = (re.search(pattern, text, re.MULTILINE) for pattern in (r"^( +)[^\s#-]", r"^( *)- "))
    yaml = YAML()
    yaml.preserve_quotes = True
    yaml.width = 4096
    dash = len(offset[1]) if offset else 2
    yaml.indent(mapping=len(mapping[1]) if mapping else 2, sequence=dash + 2, offset=dash)
    document = yaml.load(text)
    for dotted, value in overrides.items():
        _set(document, dotted.split("."), value, f"{path}: {dotted}")
    edited = StringIO()
    yaml.dump(document, edited)
    params = parse_params(YAML(typ="safe").load(edited.getvalue()), path)
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(edited.getvalue(), encoding="utf-8")
    temporary.replace(path)
    return params


def _set(node: Any, keys: list[str], value: Any, where: str) -> None:
    """Set one value; a mapping that is not there yet is made, a list must have the place."""
    for key in keys[:-1]:
        node = node.setdefault(key, {}) if isinstance(node, dict) else node[_index(node, key, where)]
    if isinstance(node, dict):
        node[keys[-1]] = value
    else:
        node[_index(node, keys[-1], where)] = value


def _index(node: Any, key: str, where: str) -> int:
    if not isinstance(node, list):
        raise UserError(f"{where}: there is no section or list before {key}")
    if not key.isdecimal() or int(key) >= len(node):
        raise UserError(f"{where}: {key} is no place in a list of {len(node)}; places are counted from 0")
    return int(key)


def _finished(layout: Layout, params: Params) -> bool:
    if not params.iterations:
        return True
    last = max(params.iterations)
    return all((folder / MANIFEST).exists() for folder in (layout.model(last), layout.evaluation(last)))


def parse(assignments: Sequence[str]) -> dict[str, Any]:
    """Values by dotted path from words such as advantages.beta=0.1; the value is YAML. Raises UserError."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    found = {}
    for assignment in assignments:
        path, equals, value = assignment.partition("=")
        if not equals:
            raise UserError(f"{assignment}: give a path and a value, as in advantages.beta=0.1")
        try:
            found[path] = YAML(typ="safe").load(value)
        except YAMLError as error:
            raise UserError(f"{assignment}: the value is not readable as YAML: {error}") from error
    return found
