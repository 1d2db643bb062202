"""Reward functions in the processes that they run in: together, one after another, killed and called again."""

import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pytest

from rloo_pipeline.config import ExecutionConfig
from rloo_pipeline.errors import UserError
from rloo_pipeline.reward_config import FunctionReward
from rloo_pipeline.rewards import worker_process
from rloo_pipeline.rewards.call import TrainerState
from rloo_pipeline.rewards.functions import open_functions
from rloo_pipeline.rewards.scored import Scored, settle
from tests.unit.test_rewards_call import rows

STATE = TrainerState(global_step=3)
TWO = ExecutionConfig(reward_workers=2)


def component(name: str, **settings: Any) -> FunctionReward:
    return FunctionReward(name=name, function=f"reward.py:{name}", **settings)


def run(root: Path, code: str, *configs: FunctionReward, table: pa.Table | None = None) -> dict[str, Scored]:
    """What the functions in `code` give for the four rows."""
    (root / "reward.py").write_text(code)
    with open_functions(configs, root, STATE, TWO) as score:
        return score(rows() if table is None else table)


def values(scored: Scored) -> list[float | None]:
    """Scores with None for NaN."""
    assert scored.scores_N.dtype == np.float64
    return [None if np.isnan(value) else value for value in scored.scores_N]


def test_functions_of_every_kind(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code = (
        "import json, signal, sys, threading\n"
        "from pathlib import Path\n"
        "print('loaded', __name__)\n"
        "READ = []\n"
        "def spoil(completions, completion_ids, answer, **kwargs):\n"
        "    del kwargs['log_extra'], kwargs['log_metric']\n"
        "    READ.append([*completions, completion_ids[0], *answer, kwargs['trainer_state'].global_step])\n"
        "    completions.clear()\n"
        "    return [0] * 4\n"
        "def after(completions, strict, **kwargs):\n"
        "    sys.stdout.write('a word of its own')\n"
        "    assert READ == [['a', 'b', 'c', 'd', [1, 2], 'a', 'a', 'd', 'd', 3]], READ\n"
        "    return [len(c) if strict else None for c in completions]\n"
        "def alarm(completions, **kwargs):\n"
        "    signal.alarm(100); signal.alarm(0)  # in the main thread alone\n"
        "    return [None, 0.1, 0, True]\n"
        "class Counter:\n"
        "    async def __call__(self, completions, **kwargs):\n"
        "        return [2.0] * 4\n"
        "counter = Counter()\n"
        "def wrapped(**kwargs):\n"
        "    return counter(**kwargs)\n"
    )
    configs = [
        component("spoil"),
        component("after", kwargs={"strict": True}),
        component("alarm"),
        component("counter"),
        component("wrapped"),
    ]
    scored = run(tmp_path, code, *configs)
    assert {name: values(found) for name, found in scored.items()} == {
        "spoil": [0.0] * 4,
        "after": [1.0] * 4,
        "alarm": [None, 0.1, 0.0, 1.0],
        "counter": [2.0] * 4,
        "wrapped": [2.0] * 4,
    }
    assert not any(found.errors for found in scored.values())
    written = capfd.readouterr()
    assert written.out == ""
    assert written.err.count("loaded") == 1
    assert "a word of its own" in written.err


def test_functions_overlap(tmp_path: Path) -> None:
    """The async ones wait for each other, and the sync one for both, so one after another would never end."""
    code = (
        "import asyncio, threading\n"
        "BOTH, DONE = asyncio.Barrier(2), threading.Event()\n"
        "async def first(**kwargs):\n"
        "    await BOTH.wait()\n"
        "    DONE.set()\n"
        "    return [1] * 4\n"
        "async def second(**kwargs):\n"
        "    await BOTH.wait()\n"
        "    return [2] * 4\n"
        "def sync(**kwargs):\n"
        "    return [DONE.wait(60)] * 4\n"
    )
    scored = run(tmp_path, code, component("sync"), component("first"), component("second"))
    assert {name: values(found)[0] for name, found in scored.items()} == {"sync": 1.0, "first": 1.0, "second": 2.0}


ENDS = {
    "raises": ("raise ValueError(completions)", r"reward.py:f raised ValueError: \['b'\]"),
    "hangs": ("re.match('(a+)+$', 'a' * 99 + 'b')", "reward.py:f took longer than 2 s and was stopped"),
    "segfaults": ("ctypes.string_at(0)", r"reward.py:f ended its process \(signal SIGSEGV\)"),
    "exits": ("os._exit(3)", r"reward.py:f ended its process \(exit status 3\)"),
    "returns too much": ("return [0] * (len(completions) + 1)", "reward.py:f returned 2 values for 1 completions"),
}
HANGING = (
    "import ctypes, os, re, time\n"
    "def f(completions, **kwargs):\n"
    "    if 'b' in completions:\n        {}\n"
    "    return [ord(c) for c in completions]\n"
    "CALLS = []\n"
    "def g(completions, **kwargs):\n"
    "    open(f'{{completions}}-{{time.monotonic()}}', 'w').close()\n"
    "    return [1] * 4\n"
    "async def h(completions, **kwargs):\n"
    "    return [2] * 4\n"
)


@pytest.mark.parametrize("end", ENDS)
def test_hanging_reward(end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    statement, reason = ENDS[end]
    configs = [
        component("g"),
        component("f", on_error="invalid", time_limit=2.0 if end == "hangs" else 60.0),
        component("h"),
    ]
    scored = run(tmp_path, HANGING.format(statement), *configs)
    assert values(scored["f"]) == [97.0, None, 99.0, 100.0]
    assert list(scored["f"].errors) == [1]
    assert re.match(reason, scored["f"].errors[1])
    assert values(scored["g"]) == [1.0] * 4
    assert values(scored["h"]) == [2.0] * 4
    assert len(list(tmp_path.glob("*-*"))) == 1  # what had finished is not called again


def test_hanging_reward_that_must_not_fail(tmp_path: Path) -> None:
    code = HANGING.format("raise ValueError('no')")
    config = component("f")
    scored = run(tmp_path, code, config)["f"]
    message = (
        r"reward f: reward.py:f raised ValueError: no \(row 2, prompt_id x, sample_index 1, completion 'b'\); mend it, "
        "or leave such rows out with on_error: invalid"
    )
    with pytest.raises(UserError, match=message):
        settle(config, rows(), scored)


def test_a_row_that_must_not_fail_ends_the_calls_of_single_rows(tmp_path: Path) -> None:
    code = "CALLS = []\ndef f(completions, **kwargs):\n    CALLS.append(completions)\n    raise ValueError(CALLS)\n"
    (tmp_path / "reward.py").write_text(code)
    with open_functions([component("f")], tmp_path, STATE, ExecutionConfig(reward_workers=1)) as score:
        errors = score(rows())["f"].errors
    assert errors == {0: "reward.py:f raised ValueError: [['a', 'b', 'c', 'd'], ['a']]"}


BATCH = "def f(completions, **kwargs):\n    assert len(completions) < 4, 'too many'\n    return [1]\n"


def test_a_batch_that_fails_though_no_row_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    problem = "reward f: reward.py:f raised AssertionError: too many on 4 rows together, but on none of them alone"
    with pytest.raises(UserError, match=rf"{problem}; mend the function \(or .*With on_error: invalid"):
        run(tmp_path, BATCH, component("f"))
    assert values(run(tmp_path, BATCH, component("f", on_error="invalid"))["f"]) == [1.0] * 4
    assert f"{problem}: the scores of the single rows are taken" in capsys.readouterr().err


def test_single_values_that_are_no_numbers_need_no_second_call(tmp_path: Path) -> None:
    code = "N = []\ndef f(**kwargs):\n    N.append(1)\n    return [len(N), float('nan'), '7', None]\n"
    scored = run(tmp_path, code, component("f"))["f"]
    assert values(scored) == [1.0, None, None, None]
    assert sorted(scored.errors) == [1, 2]
    assert scored.errors[1] == "reward.py:f returned nan, which is not finite; return None where it does not apply"


def test_async_functions_that_crash_or_block(tmp_path: Path) -> None:
    """Which of two is to blame is found out by calling each alone."""
    code = (
        "import asyncio, os, time\n"
        "async def crash(completions, **kwargs):\n"
        "    await asyncio.sleep(0.1)\n"
        "    os._exit(3) if 'd' in completions else None\n"
        "    return [1] * len(completions)\n"
        "async def fine(completions, **kwargs):\n"
        "    await asyncio.sleep(0.3)\n"
        "    return [2 * (len(completions) == 4)] * len(completions)\n"
    )
    scored = run(tmp_path, code, component("fine"), component("crash", on_error="invalid"))
    assert values(scored["crash"]) == [1.0, 1.0, 1.0, None]
    assert values(scored["fine"]) == [2.0] * 4


def test_what_functions_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = (
        "def f(completions, log_metric, log_extra, **kwargs):\n"
        "    log_metric('size', len(completions))\n"
        "    log_extra('found', [c.upper() for c in completions])\n"
        "    log_extra('one', [1, 2, 3])\n"
        "    return [1 / (c != 'c') for c in completions]\n"
        "async def g(completions, log_metric, **kwargs):\n"
        "    log_metric('size', 10)\n"
        "    return [0] * 4\n"
    )
    scored = run(tmp_path, code, component("f", on_error="invalid"), component("g"))
    # Row by row after the batch failed; the row that fails logs nothing.
    assert scored["f"].logged == {"size": (3.0, 3)}
    assert scored["f"].extra == {0: {"found": "A"}, 1: {"found": "B"}, 3: {"found": "D"}}
    assert scored["g"].logged == {"size": (40.0, 4)}
    assert capsys.readouterr().err.count("log_extra: column one has 3 values for 1 completions and is not kept") == 1


def test_tasks(tmp_path: Path) -> None:
    code = (
        "def f(completions, **kwargs):\n    return [ord(c) for c in completions]\n"
        "def g(**kwargs):\n    raise SystemExit\n"
        "def h(completions, **kwargs):\n    return [ord(c) for c in 'bq']\n"
    )
    table = rows().append_column("task", pa.array(["math", "code", "math", "chat"]))
    configs = [component("f", tasks=["math", "chat"]), component("g", tasks=["none"]), component("h", tasks=["math"])]
    scored = run(tmp_path, code, *configs, table=table)
    assert values(scored["f"]) == [97.0, None, 99.0, 100.0]
    assert values(scored["g"]) == [None] * 4
    assert values(scored["h"]) == [98.0, None, 113.0, None]
    with pytest.raises(UserError, match="reward f: tasks is math, chat, but the prompts have no column task; add it"):
        run(tmp_path, code, configs[0])


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"completions": 1}, "kwargs: completions is given to every reward function"),
        ({"answer": 1}, "kwargs: answer is a column of the dataset too; rename one"),
    ],
)
def test_kwargs_that_collide(tmp_path: Path, kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=f"reward f: {message}"):
        run(tmp_path, BATCH, component("f", kwargs=kwargs))


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import no_such_module", r"reward.py:f: .*reward.py could not be loaded: ModuleNotFoundError.*mend the file"),
        ("import os; os._exit(4)", r"the process ended \(exit status 4\) while it imported reward.py:f"),
    ],
)
def test_a_file_that_cannot_be_loaded(tmp_path: Path, code: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        run(tmp_path, code, component("f"))


HOLDS = (
    "import os, re, subprocess, time\n"
    "def f(**kwargs):\n"
    "    child = subprocess.Popen(['sleep', '1000'])\n"
    "    apart = subprocess.Popen(['sh', '-c', 'sleep 1000 & wait'], start_new_session=True)\n"
    "    open('pids.tmp', 'w').write(f'{os.getpid()} {os.getppid()} {child.pid} {apart.pid}')\n"
    "    os.rename('pids.tmp', 'pids')\n"
    "    re.match('(a+)+$', 'a' * 99 + 'b')  # keeps the interpreter's lock\n"
)


def lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def gone(folder: Path) -> bool:
    """Whether all processes end that the function told of."""
    pids = [int(pid) for pid in (folder / "pids").read_text().split()]
    deadline = time.monotonic() + 20
    while any(map(lives, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(map(lives, pids))


def test_what_a_hanging_function_started_ends_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    table = rows().slice(0, 1)
    scored = run(tmp_path, HOLDS, component("f", time_limit=1.0), table=table)["f"]
    assert list(scored.errors) == [0]
    assert gone(tmp_path)


def test_a_child_that_holds_the_pipes_does_not_hide_the_end(tmp_path: Path) -> None:
    code = (
        "import os, time\n"
        "def f(**kwargs):\n"
        "    if os.fork() == 0:\n"
        "        os.setsid()\n"
        "        time.sleep(1000)\n"
        "    os._exit(5)\n"
    )
    scored = run(tmp_path, code, component("f", on_error="invalid"), table=rows().slice(0, 1))["f"]
    assert scored.errors == {0: "reward.py:f ended its process (exit status 5)"}


def test_what_a_call_leaves_running_does_not_stop_the_next_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(worker_process, "SECONDS_TO_START", 1.0)
    code = (
        "import asyncio, time\n"
        "async def f(**kwargs):\n"
        "    asyncio.get_running_loop().call_later(0.5, time.sleep, 1000)\n"
        "    return [1]\n"
    )
    (tmp_path / "reward.py").write_text(code)
    with open_functions([component("f", on_error="invalid")], tmp_path, STATE, TWO) as score:
        assert values(score(rows().slice(0, 1))["f"]) == [1.0]
        time.sleep(1)  # now the loop is blocked
        assert values(score(rows().slice(0, 1))["f"]) == [1.0]
    assert "f could not be called for 1 s: something that a call left running is in the way" in capsys.readouterr().err


def test_nothing_lives_on_when_the_stage_is_killed(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(HOLDS)
    code = (
        "from pathlib import Path\n"
        "import pyarrow as pa\n"
        "from rloo_pipeline.config import ExecutionConfig\n"
        "from rloo_pipeline.reward_config import FunctionReward\n"
        "from rloo_pipeline.rewards.functions import TrainerState, open_functions\n"
        "rows = pa.table({'prompt': ['p'], 'completion_text': ['a'], 'completion_token_ids': [[1]]})\n"
        "config = FunctionReward(name='f', function='reward.py:f')\n"
        "with open_functions([config], Path(), TrainerState(0), ExecutionConfig()) as score:\n"
        "    score(rows)\n"
    )
    stage = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path)
    while not (tmp_path / "pids").exists():
        assert stage.poll() is None
        time.sleep(0.05)
    stage.send_signal(signal.SIGKILL)
    stage.wait()
    assert gone(tmp_path)
