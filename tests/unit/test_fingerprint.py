"""Fingerprints of logical content."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from rloo_pipeline import fingerprint

VALUES = st.lists(
    st.fixed_dictionaries(
        {
            "i": st.none() | st.integers(-9, 9),
            "f": st.none() | st.floats(-9, 9, width=32),
            "b": st.none() | st.booleans(),
            "s": st.none() | st.text(max_size=3),
            "l": st.none() | st.lists(st.none() | st.integers(0, 9), max_size=3),
            "m": st.none() | st.lists(st.fixed_dictionaries({"role": st.text(max_size=2)}), max_size=2),
        }
    ),
    min_size=1,
    max_size=8,
)
SCHEMA = pa.schema(
    {
        "i": pa.int32(),
        "f": pa.float32(),
        "b": pa.bool_(),
        "s": pa.string(),
        "l": pa.list_(pa.int32()),
        "m": pa.list_(pa.struct({"role": pa.string()})),
    }
)


@given(VALUES, st.data())
def test_chunks_and_slices_do_not_count(values: list[dict[str, object]], data: st.DataObject) -> None:
    table = pa.Table.from_pylist(values, SCHEMA)
    cut = data.draw(st.integers(0, len(values)))
    chunked = pa.concat_tables([table.slice(0, cut), table.slice(cut)])
    sliced = pa.concat_tables([table.slice(0, 1), table]).combine_chunks().slice(1)
    assert fingerprint.of_table(chunked) == fingerprint.of_table(sliced) == fingerprint.of_table(table)


@given(values=VALUES)
def test_a_parquet_file_does_not_count(values: list[dict[str, object]]) -> None:
    table = pa.Table.from_pylist(values, SCHEMA)
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    assert fingerprint.of_table(pq.read_table(pa.BufferReader(sink.getvalue()))) == fingerprint.of_table(table)


@given(VALUES, VALUES)
def test_other_values_give_another(a: list[dict[str, object]], b: list[dict[str, object]]) -> None:
    tables = [pa.Table.from_pylist(values, SCHEMA) for values in (a, b)]
    equal = json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True)
    assert (fingerprint.of_table(tables[0]) == fingerprint.of_table(tables[1])) == equal


def test_what_lies_under_nulls_does_not_count() -> None:
    mask = pa.py_buffer(bytes([0b101]))
    clean, garbage = (
        pa.Array.from_buffers(pa.int32(), 3, [mask, pa.py_buffer(np.array([1, under, 3], np.int32))])
        for under in (0, 77)
    )
    assert clean.to_pylist() == garbage.to_pylist() == [1, None, 3]
    assert fingerprint.of_table(pa.table({"x": clean})) == fingerprint.of_table(pa.table({"x": garbage}))
    offsets = pa.py_buffer(np.array([0, 1, 2, 3], np.int32))
    lists = [
        pa.Array.from_buffers(pa.list_(pa.int32()), 3, [mask, offsets], children=[pa.array(values, pa.int32())])
        for values in ([1, 0, 3], [1, 77, 3])
    ]
    assert fingerprint.of_table(pa.table({"x": lists[0]})) == fingerprint.of_table(pa.table({"x": lists[1]}))


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (pa.table({"x": ["ab", "c"]}), pa.table({"x": ["a", "bc"]})),
        (pa.table({"x": [[1], [2, 3]]}), pa.table({"x": [[1, 2], [3]]})),
        (pa.table({"x": [0, None]}), pa.table({"x": [None, 0]})),
        (pa.table({"x": [[], None]}), pa.table({"x": [None, []]})),
        (pa.table({"x": pa.array([1], pa.int32())}), pa.table({"x": pa.array([1], pa.int64())})),
        (pa.table({"x": [1], "y": [2]}), pa.table({"y": [2], "x": [1]})),
        (pa.table({"x": [1]}), pa.table({"z": [1]})),
    ],
)
def test_differences_count(left: pa.Table, right: pa.Table) -> None:
    assert fingerprint.of_table(left) != fingerprint.of_table(right)


def test_of_path(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "a").write_bytes(b"x")
    assert fingerprint.of_path(tmp_path / "d" / "a") == hashlib.sha256(b"x").hexdigest()
    before = fingerprint.of_path(tmp_path / "d")
    (tmp_path / "d" / "__pycache__").mkdir()
    (tmp_path / "d" / "__pycache__" / "a.pyc").write_bytes(b"y")
    assert fingerprint.of_path(tmp_path / "d") == before
    (tmp_path / "d" / "a").rename(tmp_path / "d" / "b")
    assert fingerprint.of_path(tmp_path / "d") != before


def test_of_tensors(tmp_path: Path) -> None:
    tensors = {"b": np.arange(6, dtype=np.float32).reshape(2, 3), "a": np.array([7], np.int64)}
    save_file({"b": tensors["b"]}, tmp_path / "1.safetensors")
    save_file({"a": tensors["a"]}, tmp_path / "2.safetensors", metadata={"format": "pt"})
    assert fingerprint.of_tensors(tmp_path.glob("*.safetensors")) == {
        "a": f"I64 [1] {hashlib.sha256(tensors['a'].tobytes()).hexdigest()}",
        "b": f"F32 [2, 3] {hashlib.sha256(tensors['b'].tobytes()).hexdigest()}",
    }


def test_a_model_is_the_same_in_one_file_or_two(tmp_path: Path) -> None:
    tensors = {"a": np.zeros(3, np.float32), "b": np.ones((2, 2), np.float32)}
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_text("{}")
    save_file(tensors, tmp_path / "one" / "model.safetensors")
    for name, value in tensors.items():
        save_file({name: value}, tmp_path / "two" / f"model-{name}.safetensors")
    (tmp_path / "two" / "model.safetensors.index.json").write_text("{}")
    assert fingerprint.of_model(tmp_path / "one") == fingerprint.of_model(tmp_path / "two")
    (tmp_path / "two" / "chat_template.jinja").write_text("x")
    assert fingerprint.of_model(tmp_path / "one")[0] != fingerprint.of_model(tmp_path / "two")[0]


@pytest.mark.parametrize("name", ["sub/x.py", "sub/deep/w.safetensors", "sub/manifest.json"])
def test_a_file_below_a_model_is_part_of_it(tmp_path: Path, name: str) -> None:
    save_file({"a": np.zeros(3, np.float32)}, tmp_path / "model.safetensors")
    before = fingerprint.of_model(tmp_path)[1]
    (tmp_path / name).parent.mkdir(parents=True)
    (tmp_path / name).write_bytes(b"x")
    added = {f"file:{name}": hashlib.sha256(b"x").hexdigest()}
    assert fingerprint.of_model(tmp_path)[1] == {**before, **added}
