"""The lineage of an iteration as a tree for people and as JSON for machines."""

import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from rloo_pipeline.audit.compare import compare_values, jsonable, printable
from rloo_pipeline.audit.lineage import Item, Node, trace
from rloo_pipeline.config import Params
from rloo_pipeline.layout import Layout

if TYPE_CHECKING:
    from rich.tree import Tree

NOT_HERE = "pruned or not checked out"


def lineage(layout: Layout, params: Params, iteration: str, *, json_output: bool) -> bool:
    """Trace, check and print; returns whether no link is broken and all that no prune removes was there to check."""
    nodes = trace(layout, params, iteration)
    problems = list(dict.fromkeys(problem for node in nodes for problem in node.problems))
    if json_output:
        print(json.dumps(as_json(iteration, nodes, problems), indent=2))
        return intact(nodes)
    from rich.console import Console

    Console().print(_tree(iteration, nodes))
    for problem in problems:
        print(f"broken: {printable(problem)}")
    missing = {str(item.path) for node in nodes for item in (*node.outputs, *node.inputs) if item.status == "missing"}
    if missing:
        print(f"not here, so known from records alone: {printable(', '.join(sorted(missing)))}")
    print(_verdict(nodes, problems))
    return intact(nodes)


def intact(nodes: Sequence[Node]) -> bool:
    """Whether no link is broken, some were checked, and nothing is missing but weights, which prune removes."""
    return not any(node.problems for node in nodes) and _links(nodes)[0] > 0 and not _missing_rows(nodes)


def _links(nodes: Sequence[Node]) -> tuple[int, int]:
    """How many links were checked by content, and how many are known from records alone."""
    items = [item for node in nodes for item in (*node.inputs, *node.outputs)]
    missing = sum(item.status == "missing" for item in items)
    return len(items) - missing, missing


def _missing_rows(nodes: Sequence[Node]) -> list[str]:
    """The artifacts that are not here and that no prune removes."""
    weights = ("policy", "reference", "trainer_state")
    items = (item for node in nodes for item in (*node.inputs, *node.outputs))
    return sorted({item.path.as_posix() for item in items if item.status == "missing" and item.name not in weights})


def _verdict(nodes: Sequence[Node], problems: Sequence[str]) -> str:
    checked, alone = _links(nodes)
    counts = f"{len(nodes)} runs of stages, {checked} links checked, {alone} known from records alone"
    if problems:
        return f"{counts}; {len(problems)} broken"
    if checked and not _missing_rows(nodes):
        return f"intact: {counts}"
    return f"not checked: {counts}; bring what is missing here with `dvc checkout`, in a fresh clone with `dvc pull`"


def as_json(iteration: str, nodes: Sequence[Node], problems: Sequence[str]) -> dict[str, Any]:
    """The lineage as strict JSON values; docs/verify.md tells the keys."""
    runs = [
        {
            "stage": node.stage,
            "iteration": node.iteration,
            "fingerprint": node.provenance["output"],
            "inputs": [_item(item) for item in node.inputs],
            "outputs": [_item(item) for item in node.outputs],
            "counts": node.counts,
            "settings": jsonable(node.provenance["settings"]),
            "seed": node.provenance.get("seed"),
            "algorithm_version": node.provenance.get("algorithm_version"),
            "versions": node.provenance["versions"],
            "device": node.provenance.get("device"),
            "problems": node.problems,
        }
        for node in nodes
    ]
    checked, alone = _links(nodes)
    return {
        "iteration": iteration,
        "intact": intact(nodes),
        "links": {"checked": checked, "recorded": alone},
        "problems": list(problems),
        "stages": runs,
    }


def _item(item: Item) -> dict[str, Any]:
    path = item.path.as_posix()
    return {
        "name": item.name, "path": path, "status": item.status, "recorded": item.recorded,
        "fingerprint": item.fingerprint,
    }  # fmt: skip


def _tree(iteration: str, nodes: Sequence[Node]) -> "Tree":
    from rich.text import Text
    from rich.tree import Tree

    tree = Tree(Text(f"policy {iteration}"))
    later: dict[str, Node] = {}
    versions: Mapping[str, Any] = {}
    for name, group in groupby(nodes, lambda node: node.iteration):
        branch = tree.add(Text(name, style="bold"))
        for node in group:
            told = branch.add(Text(printable(_title(node)), style="red" if node.problems else ""))
            lines = [_inputs(node), _settings(node, later.get(node.stage))]
            if _conditions(node) != versions:
                versions = _conditions(node)
                lines.append(f"made under {_listed(versions)}")
            for line in filter(None, lines):
                told.add(Text(printable(line), style="dim"))
            later[node.stage] = node
    return tree


def _title(node: Node) -> str:
    counts = ", ".join(f"{name.replace('_', ' ')} {count}" for name, count in node.counts.items())
    state = "broken" if node.problems else ""
    if not state and any(item.status == "missing" for item in node.outputs):
        state = NOT_HERE
    made = _short(node.provenance["output"])
    if len(node.outputs) > 1:
        made = ", ".join(f"{item.name} {_short(item.fingerprint)}" for item in node.outputs if item.fingerprint)
    return "  ".join(part for part in (node.stage, made, counts, state) if part)


def _inputs(node: Node) -> str:
    items = [f"{item.name} {_short(item.recorded)}{_state(item)}" for item in node.inputs]
    return f"from {', '.join(items)}" if items else ""


def _settings(node: Node, later: Node | None) -> str:
    ours = _flat(node)
    if later is not None and ours == _flat(later):
        return f"settings as in {later.iteration}"
    return f"settings {_listed(ours)}" if ours else ""


def _flat(node: Node) -> dict[str, Any]:
    """The settings by dotted name, without the stage's own name and without those that are null."""
    values = compare_values({**node.provenance["settings"], "seed": node.provenance.get("seed")}, {})
    return {item.name.removeprefix(f"{node.stage}."): item.left for item in values if item.left not in (None, {})}


def _conditions(node: Node) -> dict[str, Any]:
    device = {"device": node.provenance["device"]} if "device" in node.provenance else {}
    return {**node.provenance["versions"], **device}


def _listed(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def _short(fingerprint: str | None) -> str:
    return (fingerprint or "")[:12]


def _state(item: Item) -> str:
    return "" if item.status == "ok" else f" ({NOT_HERE if item.status == 'missing' else item.status})"
