"""The chain of iterations in params.yaml, lengthened or shortened in place."""

from pathlib import Path

from rloo_pipeline.config import Params, load_params, parse_params
from rloo_pipeline.errors import UserError
from rloo_pipeline.layout import INITIAL


def set_length(path: Path, count: int) -> Params:
    """Make the chain `count` iterations long, comments and finished iterations kept; raises UserError if it branches.

    A new iteration continues the last one and keeps its reference.
    """
    from ruamel.yaml import YAML
    from ruamel.yaml.comments import CommentedMap
    from ruamel.yaml.scalarstring import DoubleQuotedScalarString as Quoted

    if not 0 <= count <= 9999:
        raise UserError(f"{count} iterations: the chain can have 0 to 9999")
    params = load_params(path)
    expected = [f"{number:04d}" for number in range(1, len(params.iterations) + 1)]
    if list(params.iterations) != expected:
        raise UserError(f"{path}: iterations are not 0001, 0002, ... in order; edit the chain by hand")
    yaml = YAML()
    yaml.preserve_quotes = True
    yaml.width = 4096
    document = yaml.load(path.read_text(encoding="utf-8"))
    chain = document["iterations"]
    reference = params.iterations[expected[-1]].reference if expected else INITIAL
    for number in range(len(expected) + 1, count + 1):
        item = CommentedMap(previous=Quoted(f"{number - 1:04d}"), reference=Quoted(reference))
        item.fa.set_flow_style()
        chain[Quoted(f"{number:04d}")] = item
    for key in expected[count:]:
        del chain[key]
    changed = parse_params(YAML(typ="safe").load(_dump(yaml, document)), path)
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(_dump(yaml, document), encoding="utf-8")
    temporary.replace(path)
    return changed


def _dump(yaml: object, document: object) -> str:
    from io import StringIO

    stream = StringIO()
    yaml.dump(document, stream)  # type: ignore[attr-defined]
    return stream.getvalue()
