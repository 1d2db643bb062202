"""The chain from an iteration's updated weights back to the user's files, every link checked against content."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rloo_pipeline.audit.artifacts import (
    SOURCE,
    input_path,
    link_of,
    maker,
    output_fingerprint,
    outputs,
)
from rloo_pipeline.audit.contents import Contents
from rloo_pipeline.audit.provenance import anew, read_provenance, tells_of_another
from rloo_pipeline.config import Params
from rloo_pipeline.errors import UserError
from rloo_pipeline.layout import INITIAL, REWARD_MODEL, STAGES, Layout, check_iteration
from rloo_pipeline.progress import say

Key = tuple[str, str]  # stage, iteration
NOTHING_RECORDED: Mapping[str, Any] = {"inputs": {}, "settings": {}, "versions": {}, "output": None}


@dataclass(frozen=True)
class Item:
    """An input or output of a stage: recorded, the fingerprint in provenance (inputs), and that of what is in place.

    status: ok; missing, for what is pruned or not checked out; broken, for what is not as recorded.
    """

    name: str
    path: Path
    status: str
    recorded: str | None
    fingerprint: str | None


@dataclass
class Node:
    """One run of a stage: what is recorded of it, what is in place, and what does not fit."""

    stage: str
    iteration: str
    provenance: Mapping[str, Any]
    inputs: list[Item] = field(default_factory=list)
    outputs: list[Item] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The stage and its iteration."""
        return f"{self.stage} {self.iteration}"


def trace(layout: Layout, params: Params, iteration: str) -> list[Node]:
    """The runs that led to the weights of an iteration, the last first, all their links checked.

    Reads every file of the chain once. Raises UserError if the iteration is not in the chain or has not been run.
    """
    link_of(params, check_iteration(iteration))
    nodes = _walk(layout, params, ("prepare", INITIAL) if iteration == INITIAL else ("update", iteration))
    contents, claims = Contents(), _claims(layout, params, nodes)
    for node in nodes.values():
        say(f"reading {node.name}")
        _check_outputs(layout, node, contents, claims)
    for node in nodes.values():
        _check_inputs(layout, params, node, contents, claims)
    return list(nodes.values())


def _walk(layout: Layout, params: Params, start: Key) -> dict[Key, Node]:
    nodes: dict[Key, Node] = {}
    waiting = [start]
    while waiting:
        key = waiting.pop(0)
        if key in nodes:
            continue
        node = nodes[key] = _node(layout, params, *key)
        if node.provenance["output"] is None and key == start:
            raise UserError(f"{layout.provenance(*key)}: no such file: {node.name} has not been run; run `dvc repro`")
        link = link_of(params, node.iteration)
        made_by = [maker(*key, link, role) for role in node.provenance["inputs"]]
        waiting += [item for item in made_by if item is not None]
    return dict(sorted(nodes.items(), key=lambda item: _moment(item[0]), reverse=True))


def _moment(key: Key) -> tuple[str, int, str]:
    """Sorts runs by when they come; reward models, which come before all iterations, by name."""
    stage, iteration = key
    return ("", 0, iteration) if stage == REWARD_MODEL else (iteration, STAGES.index(stage), "")


def _node(layout: Layout, params: Params, stage: str, iteration: str) -> Node:
    try:
        provenance = read_provenance(layout, stage, iteration, params)
    except UserError as error:
        return Node(stage, iteration, NOTHING_RECORDED, problems=[str(error)])
    if provenance is not None:
        return Node(stage, iteration, provenance)
    path = layout.provenance(stage, iteration)
    problem = f"{path}: no such file, so what made {stage} {iteration} is not known; restore it with `git checkout`"
    return Node(stage, iteration, NOTHING_RECORDED, problems=[problem])


Claims = dict[Path, dict[str, list[str]]]


def _claims(layout: Layout, params: Params, nodes: Mapping[Key, Node]) -> Claims:
    """For each artifact the fingerprints that are recorded of it, and which runs recorded them."""
    claims: Claims = {}
    for node in nodes.values():
        for role, path, recorded in _recorded(layout, params, node):
            if not role.startswith(SOURCE):
                claims.setdefault(path, {}).setdefault(recorded, []).append(node.name)
    for node in nodes.values():
        places = outputs(layout, node.stage, node.iteration)
        if len(places) == 1 and node.provenance["output"] is not None:
            (path,) = places.values()
            claims.setdefault(path, {}).setdefault(node.provenance["output"], []).insert(0, node.name)
    return claims


def _recorded(layout: Layout, params: Params, node: Node) -> Iterator[tuple[str, Path, str]]:
    """Name, path and recorded fingerprint of each input."""
    link = link_of(params, node.iteration)
    for role, recorded in node.provenance["inputs"].items():
        yield role, input_path(layout, node.stage, node.iteration, link, role), recorded


def _check_outputs(layout: Layout, node: Node, contents: Contents, claims: Claims) -> None:
    known: dict[str, str] = {}
    for name, path in outputs(layout, node.stage, node.iteration).items():
        content = contents.artifact(path)
        node.outputs.append(Item(name, path, content.status, None, content.fingerprint))
        node.counts |= {
            (f"{name}_{key}" if node.stage in ("prepare", REWARD_MODEL) else key): count
            for key, count in content.counts.items()
            if (node.stage, key) != ("prepare", "step")
        }
        if content.problem is not None:
            node.problems.append(content.problem)
        elif content.fingerprint is not None:
            known[name] = content.fingerprint
        elif len(recorded := claims.get(path, {})) == 1:
            known[name] = next(iter(recorded))
        elif len(recorded) > 1:
            told = " and ".join(f"{', '.join(who)} ({which[:12]})" for which, who in recorded.items())
            node.problems.append(f"{path} is not there, and its fingerprint is recorded differently: {told}")
    if node.stage == "update":
        rows = contents.artifact(layout.advantages(node.iteration)).counts
        node.counts = {name: count for name, count in rows.items() if name == "trained"} | node.counts
    whole = node.provenance["output"]
    if whole is None or len(known) < len(node.outputs):
        return
    if (found := output_fingerprint(node.stage, known)) != whole:
        node.problems.append(tells_of_another(layout, node.stage, node.iteration, whole, found))


def _check_inputs(layout: Layout, params: Params, node: Node, contents: Contents, claims: Claims) -> None:
    for role, path, recorded in _recorded(layout, params, node):
        is_source = role.startswith(SOURCE)
        content = contents.source(path) if is_source else contents.artifact(path)
        status = content.status
        if content.fingerprint is not None and content.fingerprint != recorded:
            status = "broken"
            node.problems.append(_mismatch(node, path, recorded, content.fingerprint, is_source))
        elif status == "missing" and len(claims.get(path, {})) > 1:
            status = "broken"
        node.inputs.append(Item(role, path, status, recorded, content.fingerprint))


def _mismatch(node: Node, path: Path, recorded: str, found: str, is_source: bool) -> str:
    if is_source:
        return (
            f"{path}: edited after {node.name} read it ({recorded[:12]}, now {found[:12]}); restore it, or run "
            f"`dvc repro`, and {anew(node.stage, node.iteration)} if that has nothing to do"
        )
    return (
        f"{node.name} was made from another {path} ({recorded[:12]}) than the one in place ({found[:12]}); restore "
        f"that with `dvc checkout`, or run `dvc repro`, and {anew(node.stage, node.iteration)} if that has nothing to "
        "do"
    )
