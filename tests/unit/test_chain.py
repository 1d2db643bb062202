"""The chain of iterations, edited in place."""

from pathlib import Path

import pytest
from ruamel.yaml import YAML

from rloo_pipeline.chain import set_length
from rloo_pipeline.config import load_params
from rloo_pipeline.errors import UserError
from tests.project import PARAMS, REPOSITORY

CHAIN = """\
# The head's comment.
iterations:  # the chain
  "0001": {previous: "0000", reference: "0000"}  # the first
  "0002":  # written in block style
    previous: "0001"
    reference: "0001"  # another reference

# Before the rest.
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A params.yaml with comments and a chain of two."""
    rest = {key: value for key, value in PARAMS.items() if key != "iterations"}
    with (tmp_path / "params.yaml").open("w") as file:
        file.write(CHAIN)
        YAML().dump(rest, file)
    return tmp_path / "params.yaml"


def test_longer_adds_lines_and_changes_none(path: Path) -> None:
    before = path.read_text()
    set_length(path, 4)
    chain = load_params(path).iterations
    assert {key: (item.previous, item.reference) for key, item in chain.items()} == {
        "0001": ("0000", "0000"),
        "0002": ("0001", "0001"),
        "0003": ("0002", "0001"),
        "0004": ("0003", "0001"),
    }
    new = '  "0003": {previous: "0002", reference: "0001"}\n  "0004": {previous: "0003", reference: "0001"}\n'
    assert path.read_text() == before.replace("# another reference\n", f"# another reference\n{new}")
    set_length(path, 2)
    assert path.read_text() == before


def test_shorter_removes_lines_and_changes_none(path: Path) -> None:
    before = path.read_text()
    set_length(path, 1)
    assert list(load_params(path).iterations) == ["0001"]
    start, end = before.index('  "0002"'), before.index("\n# Before the rest.")
    assert path.read_text() == before[:start] + before[end:]


def test_same_length_keeps_the_content(path: Path) -> None:
    before = path.read_text()
    set_length(path, 2)
    assert path.read_text() == before


def test_to_nothing_and_back(path: Path) -> None:
    before = path.read_text()
    set_length(path, 0)
    assert load_params(path).iterations == {}
    assert "iterations: {}  # the chain\n" in path.read_text()
    set_length(path, 1)
    assert load_params(path).iterations["0001"].reference == "0000"
    start, end = before.index("  # the first"), before.index("\n# Before the rest.")
    assert path.read_text() == before[:start] + "\n" + before[end:]


def test_the_projects_own_chain(tmp_path: Path) -> None:
    path = tmp_path / "params.yaml"
    before = (REPOSITORY / "params.yaml").read_text()
    path.write_text(before)
    length = len(load_params(path).iterations)
    for count in (length + 3, length - 1):
        set_length(path, count)
        assert len(load_params(path).iterations) == count
    set_length(path, length)
    assert path.read_text() == before


def test_a_chain_in_braces_is_left_alone(path: Path) -> None:
    start, end = path.read_text().index("iterations:"), path.read_text().index("# Before")
    chain = 'iterations: {"0001": {previous: "0000", reference: "0000"}}\n'
    path.write_text(path.read_text()[:start] + chain + path.read_text()[end:])
    with pytest.raises(UserError, match=r"params\.yaml: .*braces; write each on a line of its own"):
        set_length(path, 3)


@pytest.mark.parametrize("count", [-1, 10000])
def test_impossible_lengths(path: Path, count: int) -> None:
    before = path.read_text()
    with pytest.raises(UserError, match=f"{count} iterations: the chain can have 0 to 9999"):
        set_length(path, count)
    assert path.read_text() == before


def test_a_chain_with_gaps_is_left_alone(path: Path) -> None:
    path.write_text(path.read_text().replace('"0002":', '"0005":'))
    before = path.read_text()
    with pytest.raises(UserError, match=r"params\.yaml: iterations are not 0001, 0002.*by hand"):
        set_length(path, 3)
    assert path.read_text() == before


def test_nothing_temporary_is_left(path: Path) -> None:
    set_length(path, 3)
    assert [file.name for file in path.parent.iterdir()] == ["params.yaml"]


def test_before_follows_previous_and_not_the_order_of_the_file():
    from rloo_pipeline.chain import before
    from rloo_pipeline.config import parse_params
    from tests.project import PARAMS

    chain = {
        key: {"previous": previous, "reference": "0000"}
        for key, previous in (("0001", "0000"), ("0002", "0001"), ("0003", "0001"), ("0004", "0003"))
    }
    params = parse_params({**PARAMS, "iterations": chain})
    assert before(params, "0004") == ["0001", "0003"]
    assert before(params, "0001") == []
