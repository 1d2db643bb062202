"""Seeds: distinct for distinct purposes, the same on every machine."""

import hashlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rloo_pipeline.seeds import derive

PARTS = st.tuples(st.integers(0, 2**40), st.lists(st.integers(-9, 99) | st.text(max_size=4), max_size=4).map(tuple))


def independent(texts: list[str]) -> int:
    """BLAKE2b-64 over the length-prefixed texts, without its lowest bit."""
    message = b"".join(struct.pack(">Q", len(text.encode())) + text.encode() for text in texts)
    (value,) = struct.unpack(">Q", hashlib.blake2b(message, digest_size=8).digest())
    return value // 2


def test_known_values() -> None:
    assert derive(17) == independent(["int:17"])
    assert derive(17, "rollouts", "0001", "train-000003", 2) == independent(
        ["int:17", "str:rollouts", "str:0001", "str:train-000003", "int:2"]
    )
    assert derive(0, "naïve") == independent(["int:0", "str:naïve"])


@given(PARTS, PARTS)
def test_distinct_parts_give_distinct_seeds(
    a: tuple[int, tuple[str | int, ...]], b: tuple[int, tuple[str | int, ...]]
) -> None:
    assert (derive(a[0], *a[1]) == derive(b[0], *b[1])) == (a == b)


@given(PARTS)
def test_range(a: tuple[int, tuple[str | int, ...]]) -> None:
    assert 0 <= derive(a[0], *a[1]) < 2**63


@pytest.mark.parametrize(("a", "b"), [(("ab", "c"), ("a", "bc")), ((1,), ("1",)), (("a", 1), (1, "a")), ((), ("",))])
def test_seed_twins(a: tuple[str | int, ...], b: tuple[str | int, ...]) -> None:
    assert derive(0, *a) != derive(0, *b)
