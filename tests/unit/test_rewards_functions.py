"""Reward functions: what they are called with and what they may return."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from rloo_pipeline.data.prompts import MESSAGES
from rloo_pipeline.errors import UserError
from rloo_pipeline.reward_config import FunctionReward
from rloo_pipeline.rewards.functions import TrainerState, score_functions

STATE = TrainerState(global_step=3)
SEEN = "SEEN = []\ndef f(**kwargs):\n    SEEN.append(kwargs)\n    return [0.0] * len(kwargs['prompts'])\n"


def rows(conversational: bool = False, **columns: Any) -> pa.Table:
    """Two completions of each of two prompts, joined with their dataset columns."""
    prompts: list[Any] = ["p", "p", "q", "q"]
    if conversational:
        prompts = [[{"role": "user", "content": text}] for text in prompts]
    return pa.table(
        {
            "iteration": pa.array([4] * 4, pa.int32()),
            "prompt_id": ["x", "x", "y", "y"],
            "sample_index": pa.array([0, 1, 0, 1], pa.int32()),
            "prompt_text": ["<p>", "<p>", "<q>", "<q>"],
            "completion_text": ["a", "b", "c", "d"],
            "completion_token_ids": pa.array([[1, 2], [3], [4], [5, 6]], pa.list_(pa.int32())),
            "seed": [1, 2, 3, 4],
            "prompt": pa.array(prompts, MESSAGES if conversational else pa.string()),
            "answer": ["a", "a", "d", "d"],
            **columns,
        }
    )


def run(root: Path, code: str, table: pa.Table | None = None, **kwargs: Any) -> list[Any]:
    """Scores of `f` in `code`, with None for NaN."""
    (root / "reward.py").write_text(code)
    config = FunctionReward(name="mine", function="reward.py:f", kwargs=kwargs)
    scores_N = score_functions([config], rows() if table is None else table, root, STATE)["mine"]
    assert scores_N.dtype == np.float64
    return [None if np.isnan(value) else value for value in scores_N]


def arguments(root: Path, table: pa.Table, **kwargs: Any) -> dict[str, Any]:
    (root / "reward.py").write_text("def f(seen, **kwargs):\n    seen.append(kwargs)\n    return [0] * 4\n")
    seen: list[dict[str, Any]] = []
    config = FunctionReward.model_construct(name="mine", function="reward.py:f", kwargs={"seen": seen, **kwargs})
    score_functions([config], table, root, STATE)
    return seen[0]


def test_arguments_for_strings(tmp_path: Path) -> None:
    given = arguments(tmp_path, rows(), strict=True)
    logs = [given.pop("log_extra"), given.pop("log_metric")]
    assert all(map(callable, logs))
    assert given == {
        "prompts": ["p", "p", "q", "q"],
        "completions": ["a", "b", "c", "d"],
        "completion_ids": [[1, 2], [3], [4], [5, 6]],
        "prompt_id": ["x", "x", "y", "y"],
        "answer": ["a", "a", "d", "d"],
        "trainer_state": STATE,
        "strict": True,
    }


def test_arguments_for_messages(tmp_path: Path) -> None:
    given = arguments(tmp_path, rows(conversational=True))
    assert given["prompts"] == [[{"role": "user", "content": text}] for text in "ppqq"]
    assert given["completions"] == [[{"role": "assistant", "content": text}] for text in "abcd"]


def test_functions_cannot_change_what_the_next_one_sees(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(
        "def spoil(completions, **kwargs):\n    completions.clear()\n    return [0] * 4\n"
        "def length(completions, **kwargs):\n    return [len(c) for c in completions]\n"
    )
    configs = [FunctionReward(name=name, function=f"reward.py:{name}") for name in ("spoil", "length")]
    assert score_functions(configs, rows(), tmp_path, STATE)["length"].tolist() == [1.0] * 4


@pytest.mark.parametrize("define", ["def", "async def"])
def test_none_does_not_apply(tmp_path: Path, define: str) -> None:
    code = f"{define} f(completions, answer, **kwargs):\n    return [1.0, None, 0, True]\n"
    assert run(tmp_path, code) == [1.0, None, 0.0, 1.0]


@pytest.mark.parametrize("value", ["numpy.array([1, 2, 3, 4])", "tuple(numpy.float32(i) for i in (1, 2, 3, 4))"])
def test_arrays_and_numpy_numbers(tmp_path: Path, value: str) -> None:
    assert run(tmp_path, f"import numpy\ndef f(**kwargs):\n    return {value}\n") == [1.0, 2.0, 3.0, 4.0]


def test_tensors(tmp_path: Path) -> None:
    code = "import torch\ndef f(**kwargs):\n    return torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.bfloat16)\n"
    assert run(tmp_path, code) == [1.0, 2.0, 3.0, 4.0]


def test_scores_are_what_float32_stores(tmp_path: Path) -> None:
    assert run(tmp_path, "def f(**kwargs):\n    return [0.1] * 4\n") == [float(np.float32(0.1))] * 4


def test_callable_object(tmp_path: Path) -> None:
    code = "class F:\n    async def __call__(self, completions, **kwargs):\n        return [2.0] * 4\nf = F()\n"
    assert run(tmp_path, code) == [2.0] * 4


def test_async_functions_overlap(tmp_path: Path) -> None:
    # Each waits for the other, so one after the other would never end.
    (tmp_path / "reward.py").write_text(
        "import asyncio\n"
        "HERE = []\n"
        "async def first(**kwargs):\n"
        "    HERE.append(1)\n"
        "    await asyncio.wait_for(both(), 20)\n"
        "    return [1] * 4\n"
        "second = first\n"
        "async def both():\n"
        "    while len(HERE) < 2:\n"
        "        await asyncio.sleep(0.01)\n"
    )
    configs = [FunctionReward(name=name, function=f"reward.py:{name}") for name in ("first", "second")]
    scores = score_functions(configs, rows(), tmp_path, STATE)
    assert [values.tolist() for values in scores.values()] == [[1.0] * 4] * 2


def test_inside_a_running_event_loop(tmp_path: Path) -> None:
    async def notebook() -> list[Any]:
        return run(tmp_path, "async def f(**kwargs):\n    return [1] * 4\n")

    assert asyncio.run(notebook()) == [1.0] * 4


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ("[1.0, 2.0]", "reward.py:f returned 2 values for 4 completions; it must return one for each"),
        ("[]", "returned 0 values for 4 completions"),
        ("1.0", "returned a float; it must return a list with one number for each completion"),
        ("None", "returned a NoneType; it must return a list"),
        ("'1234'", "returned '1' for row 1"),
        ("[1, 2, '3', 4]", "returned '3' for row 3, prompt_id y, sample_index 0; return a number, or None"),
        ("[1, [2], 3, 4]", r"returned \[2\] for row 2, prompt_id x, sample_index 1; return a number"),
        ("[1, 1j, 3, 4]", "returned 1j for row 2"),
        ("[1, 2, 3, float('nan')]", "returned nan for row 4, prompt_id y, sample_index 1, which is not finite"),
        ("[1, float('-inf'), 3, 4]", "returned -inf for row 2, .* not finite in float32"),
        ("[1, 1e39, 3, 4]", r"returned 1e\+39 for row 2, .* not finite in float32"),
        ("[1, 10**400, 3, 4]", "for row 2, .* not finite in float32"),
    ],
)
@pytest.mark.parametrize("define", ["def", "async def"])
def test_bad_values(tmp_path: Path, define: str, returned: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        run(tmp_path, f"{define} f(**kwargs):\n    return {returned}\n")
    assert str(caught.value).startswith("reward mine: reward.py:f")


@pytest.mark.parametrize("define", ["def", "async def"])
def test_a_function_that_raises(tmp_path: Path, define: str) -> None:
    code = f"{define} f(completions, **kwargs):\n    return [{{'a': 1, 'b': 2, 'd': 3}}[c] for c in completions]\n"
    message = (
        r"reward mine: reward.py:f raised KeyError: 'c' \(at row 3, prompt_id y, sample_index 0\); mend the function"
    )
    with pytest.raises(UserError, match=message):
        run(tmp_path, code)


def test_a_function_that_raises_on_the_whole_alone(tmp_path: Path) -> None:
    code = "def f(completions, **kwargs):\n    assert len(completions) < 4, 'too many'\n    return [0]\n"
    with pytest.raises(
        UserError, match=r"AssertionError: too many \(called on 4 rows from row 1, prompt_id x.* no row"
    ):
        run(tmp_path, code)


def test_a_function_without_kwargs(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"raised TypeError: .*unexpected keyword argument.*needs \*\*kwargs"):
        run(tmp_path, "def f(completions):\n    return [0] * 4\n")


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"completions": 1}, "kwargs: completions is given to every reward function"),
        ({"answer": 1}, "kwargs: answer is a column of the dataset too; rename one"),
    ],
)
def test_kwargs_that_collide(tmp_path: Path, kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=f"reward mine: {message}"):
        run(tmp_path, SEEN, **kwargs)


def test_what_a_function_logs_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = "def f(log_metric, log_extra, **kwargs):\n    log_metric('right', 0.5)\n    log_extra('found', ['a'] * 4)\n"
    run(tmp_path, code + "    return [0] * 4\n")
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "reward mine: right = 0.5",
        "reward mine: log_extra: column found (4 values) is not stored",
    ]
