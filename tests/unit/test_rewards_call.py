"""One call of a reward function: what it is given, what it may log and what it may return."""

import copy
import functools
import json
from fractions import Fraction
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rloo_pipeline.data.prompts import MESSAGES
from rloo_pipeline.errors import UserError
from rloo_pipeline.rewards.call import Logs, TrainerState, Unusable, arguments, checked, is_async, ready, told

STATE = TrainerState(global_step=3)


def rows(conversational: bool = False) -> pa.Table:
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
        }
    )


def test_arguments_for_strings() -> None:
    assert arguments(rows(), STATE) == {
        "prompts": ["p", "p", "q", "q"],
        "completions": ["a", "b", "c", "d"],
        "completion_ids": [[1, 2], [3], [4], [5, 6]],
        "prompt_id": ["x", "x", "y", "y"],
        "answer": ["a", "a", "d", "d"],
        "trainer_state": STATE,
    }


def test_arguments_for_messages() -> None:
    found = arguments(rows(conversational=True), STATE)
    assert found["prompts"] == [[{"role": "user", "content": text}] for text in "ppqq"]
    assert found["completions"] == [[{"role": "assistant", "content": text}] for text in "abcd"]


def test_the_trainer_state_tells_what_is_known_and_no_more() -> None:
    assert STATE.global_step == 3
    assert STATE.is_world_process_zero
    assert getattr(STATE, "max_steps", 7) == 7
    with pytest.raises(AttributeError, match=r"no max_steps here, but global_step .*give whatever .* in kwargs"):
        _ = STATE.global_step / STATE.max_steps
    assert copy.deepcopy(STATE).global_step == 3


def good(completions: Any, **kwargs: Any) -> Any:
    return [kwargs] * len(completions)


def make(limit: int, *, low: int = 0) -> Any:
    return lambda completions, **kwargs: [limit] * len(completions)


class Limit:
    def __init__(self, limit: int) -> None:
        self.limit = limit

    def __call__(self, completions: Any, **kwargs: Any) -> Any:
        return [self.limit] * len(completions)


@pytest.mark.parametrize("found", [make, Limit])
def test_what_takes_no_completions_is_called_to_make_the_function(found: Any) -> None:
    function, kwargs = ready("m:f", found, {"limit": 7})
    assert kwargs == {}
    assert function(completions=["a", "b"]) == [7, 7]


@pytest.mark.parametrize("found", [good, functools.partial(good, k=1), Limit(3), lambda completions: [0], max])
def test_what_takes_completions_is_the_function(found: Any) -> None:
    assert ready("m:f", found, {"a": 1}) == (found, {"a": 1})


@pytest.mark.parametrize(
    ("found", "kwargs", "message"),
    [
        (make, {"size": 7}, r"m:f takes no completions, so it was called to make .*with kwargs \(size\), and raised"),
        (lambda: [0, 1], {}, r"but it made a list; a reward function takes completions, or \*\*kwargs"),
    ],
)
def test_what_makes_no_function(found: Any, kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        ready("m:f", found, kwargs)


async def slow(**kwargs: Any) -> None: ...


class Async:
    async def __call__(self, **kwargs: Any) -> None: ...


@pytest.mark.parametrize(
    "function", [slow, functools.partial(slow), functools.partial(functools.partial(slow)), Async()]
)
def test_async(function: Any) -> None:
    assert is_async(function)


def test_sync() -> None:
    assert not any(map(is_async, (good, functools.partial(good), Limit(3), max)))


@pytest.mark.parametrize(
    "output",
    [
        [1, 2.0, True, None],
        (1, 2, 1, None),
        np.array([1, 2, 1, None], dtype=object),
        [np.float32(1), np.int64(2), Fraction(1), None],
        [torch.tensor(1.0), torch.tensor(2, dtype=torch.int8), torch.tensor([1.0]), None],
        iter([1, 2, 1, None]),
    ],
)
def test_numbers_of_any_kind(output: Any) -> None:
    assert checked(output, 4) == ([1.0, 2.0, 1.0, None], {})


def test_arrays_and_tensors() -> None:
    assert checked(np.array([1.5, 2]), 2) == ([1.5, 2.0], {})
    assert checked(torch.tensor([1.5, 2], dtype=torch.bfloat16), 2) == ([1.5, 2.0], {})


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("3", "returned '3'; return a number, or None where it does not apply"),
        ([2], "returned [2]; return a number"),
        (1j, "returned 1j; return a number"),
        (float("nan"), "returned nan, which is not finite; return None"),
        (float("-inf"), "returned -inf, which is not finite"),
        (10**400, "which is not finite"),
    ],
)
def test_one_row_without_a_number(value: Any, message: str) -> None:
    scores, errors = checked([1, value, None, 4], 4)
    assert scores == [1.0, None, None, 4.0]
    assert list(errors) == [1]
    assert message in errors[1]


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ([1.0, 2.0], "returned 2 values for 4 completions; it must return one for each"),
        ([], "returned 0 values for 4 completions"),
        (1.0, "returned a float; it must return a list with one number for each completion"),
        (None, "returned a NoneType; it must return a list"),
        ("1234", "returned a str"),
        ({1: 2, 3: 4, 5: 6, 7: 8}, "returned a dict"),
    ],
)
def test_no_list_of_one_value_for_each_row(output: Any, message: str) -> None:
    with pytest.raises(Unusable, match=message):
        checked(output, 4)


def test_logs() -> None:
    logs = Logs()
    for value in ("a", None):  # by rows or all at once, as TRL takes them
        logs.log_extra("found", [value])
    logs.log_extra("kinds", [np.float32(0.5), Fraction(1, 3)])
    logs.log_extra("not all", [1])
    for value in (1, 2.0):
        logs.log_metric("right", value)
    logs.log_metric("bad", float("nan"))
    assert logs.told(2) == {
        "extra": {"found": ["a", None], "kinds": [0.5, "1/3"]},
        "metrics": {"right": 1.5},
        "misfits": [
            "log_extra: column not all has 1 values for 2 completions and is not kept",
            "log_metric: bad is nan and is not kept",
        ],
    }


@given(
    st.recursive(st.none() | st.floats() | st.binary() | st.text(), lambda inner: st.lists(inner) | st.sets(st.text()))
)
def test_whatever_is_logged_can_be_kept_as_json(value: Any) -> None:
    logs = Logs()
    logs.log_extra("any", [value])
    told_as = json.loads(json.dumps(logs.told(1), allow_nan=False))
    assert list(told_as["extra"]) == ["any"]
    assert len(told_as["extra"]["any"]) == 1
    assert told_as["misfits"] == []


def test_a_function_without_kwargs_is_told_what_it_needs() -> None:
    with pytest.raises(TypeError) as raised:
        (lambda completions: completions)(completions=[], prompts=[])  # type: ignore[call-arg]
    assert "it is called with prompts, completions, " in told(raised.value)
    assert "so it needs **kwargs" in told(raised.value)
    assert told(ValueError("no")) == "ValueError: no"


def test_a_function_whose_column_is_missing_is_told_what_to_do() -> None:
    with pytest.raises(TypeError) as raised:
        (lambda completions, solution, **kwargs: completions)(completions=[])  # type: ignore[call-arg]
    assert "missing 1 required positional argument: 'solution' (if it is a column of the dataset" in told(raised.value)
    assert "(" not in told(TypeError("no"))


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError


def test_an_exception_without_a_text() -> None:
    assert told(Mute()) == "Mute, which cannot be written as text"
