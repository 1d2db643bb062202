"""Rows from files, hub datasets and functions, and what is said of broken ones."""

import json
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rloo_pipeline.data.load import load_rows
from rloo_pipeline.data_config import DatasetConfig
from rloo_pipeline.errors import UserError

ROWS = [
    {"prompt": "What is 3 + 5?", "answer": "8", "digits": [3, 5]},
    {"prompt": "Naïve: 1 + 1?\nSay it.", "answer": "2", "digits": [1, 1]},
]


def load_file(root: Path, name: str) -> pa.Table:
    return load_rows(DatasetConfig(file=Path(name)), root)


def load_generator(root: Path, code: str, **kwargs: object) -> pa.Table:
    (root / "make.py").write_text(code)
    return load_rows(DatasetConfig(generator="make.py:rows", kwargs=kwargs), root)


def test_jsonl(tmp_path: Path) -> None:
    lines = [json.dumps(row, ensure_ascii=False) for row in ROWS]
    (tmp_path / "data.jsonl").write_text(lines[0] + "\n\n" + lines[1] + "\n", encoding="utf-8-sig")
    assert load_file(tmp_path, "data.jsonl").to_pylist() == ROWS


def test_jsonl_keeps_dates_as_text_and_columns_that_come_late(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "day": "2024-01-05"}, {"prompt": "b", "day": "2024-01-06", "hint": "c"}]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert load_file(tmp_path, "data.jsonl").to_pylist() == [{**rows[0], "hint": None}, rows[1]]


def test_csv(tmp_path: Path) -> None:
    text = '007,"What is\n3, 5?",8,0.5,,2024-01-05\n010,"1 + 1?",2,1,x,2024-01-06\n'
    (tmp_path / "data.csv").write_text("prompt_id,prompt,answer,share,hint,day\n" + text)
    assert load_file(tmp_path, "data.csv").to_pylist() == [
        {"prompt_id": "007", "prompt": "What is\n3, 5?", "answer": 8, "share": 0.5, "hint": None, "day": "2024-01-05"},
        {"prompt_id": "010", "prompt": "1 + 1?", "answer": 2, "share": 1.0, "hint": "x", "day": "2024-01-06"},
    ]


def test_parquet(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "data.parquet")
    assert load_file(tmp_path, "data.parquet").to_pylist() == ROWS


def test_hub_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "hub").mkdir()
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "hub" / "test.parquet")
    config = DatasetConfig(hub=str(tmp_path / "hub"), split="test")
    assert load_rows(config, tmp_path).to_pylist() == ROWS


def test_hub_dataset_that_cannot_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=r"nobody/nothing \(split train\) could not be loaded.*network.*use a file"):
        load_rows(DatasetConfig(hub="nobody/nothing", split="train"), tmp_path)


def test_generator_with_kwargs(tmp_path: Path) -> None:
    code = "def rows(n, word):\n    return [{'prompt': word * (i + 1)} for i in range(n)]\n"
    assert load_generator(tmp_path, code, n=2, word="a").to_pylist() == [{"prompt": "a"}, {"prompt": "aa"}]


def test_generator_in_an_installed_module(tmp_path: Path) -> None:
    config = DatasetConfig(generator="json:loads", kwargs={"s": '[{"prompt": "a"}]'})
    assert load_rows(config, tmp_path).to_pylist() == [{"prompt": "a"}]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("gone.jsonl", None, "gone.jsonl: no such file"),
        ("data.txt", b"", r"data.txt: .txt is not read; use one of .jsonl, .csv, .parquet"),
        ("data.jsonl", b'{"prompt": "a"}\n{"prompt": \n', r"data.jsonl: line 2 is not JSON .*; mend or remove it"),
        ("data.jsonl", b'{"prompt": "a"}\n\n["b"]\n', "data.jsonl: line 3 is a list; each line must be an object"),
        ("data.jsonl", b'{"prompt": "a", "n": ' + b"9" * 5000 + b"}", "data.jsonl: line 1 is not JSON .*5000 digits"),
        ("data.jsonl", b'{"prompt": "a", "n": ' + b"[" * 10**5, "data.jsonl: line 1 is not JSON .*recursion depth"),
        ("data.jsonl", b'{"prompt": "\xff"}\n', "data.jsonl: not UTF-8 .*; save it as UTF-8"),
        (
            "data.jsonl",
            b'{"a": 1}\n{"a": 2}\n\n{"a": "x"}\n{"a": 4}\n',
            "data.jsonl: line 4, column a: 'x' does not go with the rows before it .*; give the column one type",
        ),
        (
            "data.csv",
            b"prompt,answer\na,1\nb\n",
            r"data.csv: not readable as CSV \(.*Row #3: Expected 2 columns, got 1",
        ),
        ("data.csv", b"prompt,a,a\nx,1,2\n", "data.csv: two columns have the name a; rename one"),
        ("data.csv", b"", "data.csv: not readable as CSV"),
        ("data.parquet", b"PAR1 but no more", r"data.parquet: not readable as Parquet \(.*; write or copy it anew"),
    ],
)
def test_broken_files(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        load_file(tmp_path, name)


def test_truncated_parquet(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(ROWS * 100), tmp_path / "data.parquet")
    whole = (tmp_path / "data.parquet").read_bytes()
    (tmp_path / "data.parquet").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match="not readable as Parquet"):
        load_file(tmp_path, "data.parquet")


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("def other(): return []", "make.py has no rows; it has other"),
        ("rows = [{'prompt': 'a'}]", "rows is a list, not a callable; name a function"),
        (
            "def rows(): return ({'prompt': 'a'},)",
            "make.py:rows: returned a tuple; it must return a list of dicts, .* or a datasets.Dataset",
        ),
        ("def rows(): return [{'prompt': 'a'}, 'b']", "make.py:rows: row 2 is a str; it must be a dict"),
        ("def rows(): return [{'prompt': 'a', 'x': 1}, {'prompt': 'b', 'x': 'y'}]", "row 2, column x: 'y' does not go"),
        ("def rows(): return [{'prompt': object()}]", "row 1, column prompt: <object"),
        ("def rows(): return [{'prompt': '\\ud800'}]", "row 1, column prompt"),
        (
            "def rows(): return [{'prompt': 'a', 'x': 2**70}]",
            "row 1, column x: 1180591620717411303424 cannot be kept .*text if no",
        ),
        ("def rows(): return 1 / 0", "raised ZeroDivisionError: division by zero; mend it or its kwargs"),
        ("def rows(n): return []", "raised TypeError.*'n'"),
        ("import no_such_module", "make.py could not be loaded: ModuleNotFoundError.*no_such_module"),
        ("def rows(: pass", "make.py could not be loaded: SyntaxError"),
    ],
)
def test_broken_generators(tmp_path: Path, code: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_generator(tmp_path, code)


def test_csv_answers_with_leading_zeros_stay_text(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("prompt,answer,count\na,007,7\nb,7,12\n")
    table = load_rows(DatasetConfig(file=path), tmp_path)
    assert table["answer"].to_pylist() == ["007", "7"]
    assert table["count"].to_pylist() == [7, 12]


@pytest.mark.parametrize(
    ("cells", "values"),
    [
        (["8", "-2.5", "1e3"], [8.0, -2.5, 1000.0]),
        (["0.30000000000000004", ""], [0.1 + 0.2, None]),
        (["TRUE", "false"], [True, False]),
        (["9223372036854775807", "1"], [9223372036854775807, 1]),
        (["9223372036854775808", "1"], ["9223372036854775808", "1"]),
        (["121932631112635269", "1.5"], ["121932631112635269", "1.5"]),
        (["007", "1.5"], ["007", "1.5"]),
        (["inf", "nan"], ["inf", "nan"]),
    ],
)
def test_csv_cells_that_a_number_cannot_hold_leave_the_column_text(
    tmp_path: Path, cells: list[str], values: list[object]
) -> None:
    (tmp_path / "rows.csv").write_text("prompt,a\n" + "".join(f"p,{cell}\n" for cell in cells))
    assert load_file(tmp_path, "rows.csv")["a"].to_pylist() == values


def test_generator_that_returns_a_dataset_of_the_hub_client(tmp_path: Path) -> None:
    code = (
        "import datasets\n"
        "def rows():\n"
        "    made = datasets.Dataset.from_list([{'ask': 'a'}, {'ask': 'b'}, {'ask': 'c'}])\n"
        "    return made.select([0, 2]).map(lambda row: {'prompt': row['ask'] * 2})\n"
    )
    assert load_generator(tmp_path, code).to_pylist() == [{"ask": "a", "prompt": "aa"}, {"ask": "c", "prompt": "cc"}]


def test_csv_of_several_blocks_with_newlines_in_its_cells(tmp_path: Path) -> None:
    cell = "\n".join("abc" * 100)
    (tmp_path / "rows.csv").write_text("prompt,n\n" + "".join(f'"{cell}",{n}\n' for n in range(4000)))
    table = load_file(tmp_path, "rows.csv")
    assert table["n"].to_pylist() == list(range(4000))
    assert set(table["prompt"].to_pylist()) == {cell}
