"""`rloo check`: everything that is wrong is told in one run, nothing runs and nothing is written."""

import json
import os
import re
import shutil
import socket
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import LlamaConfig, LlamaForSequenceClassification

from rloo_pipeline.check import memory, tokens
from rloo_pipeline.check.machine import Device
from rloo_pipeline.check.machine import memory as compare
from rloo_pipeline.check.models import look
from rloo_pipeline.check.project import disk
from rloo_pipeline.check.prompts import Rendered, twice_begun
from rloo_pipeline.check.report import Report
from rloo_pipeline.config import Params, parse_params
from rloo_pipeline.layout import Layout
from tests.conftest import CommandLine
from tests.project import PARAMS, Project
from tests.tiny import make_model, make_policy, make_tokenizer

# By hand: embedding 258 x 64; twice attention 2 x 64 x 64 + 2 x 64 x 32, MLP 3 x 64 x 96 and norms 2 x 64; norm 64.
PARAMETERS = 258 * 64 + 2 * (12288 + 18432 + 128) + 64
RAISES = """
def score(completions, **kwargs):
    return [1 / len(text) for text in completions]

def strict(prompts, completions):
    return [0.0 for _ in completions]
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    # As in an activated environment.
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    return Project.create(tmp_path / "project")


def findings(stdout: str) -> list[tuple[str, str, str]]:
    found = re.findall(r"^(ok|warning|error) +([^:]+): (.*(?:\n {9}.*)*)", stdout, re.MULTILINE)
    assert found
    return found


def files(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_a_project_in_order(project: Project, rloo: CommandLine) -> None:
    before = files(project.root)
    outcome = rloo(project, "check")
    assert outcome.code == 0, outcome.stdout
    told = findings(outcome.stdout)
    assert {level for level, _, _ in told} == {"ok"}
    assert outcome.stdout.endswith("no errors, no warnings\n")
    text = {where: what for _, where, what in told}
    assert text["policy.model"] == "tiny: 0.1 M parameters, context 256, a chat template"
    assert text["example"].endswith("\n         Say a:")
    assert text["rollouts.prompts_per_iteration"].startswith("4 of 8 prompts")
    # The reward counts letters of the answer: of a, in "The answer is 42." one of 17 characters.
    assert text["rewards, letters"] == "scores of two made-up completions: 0.0555556, 0"
    # By hand: 4 prompts of 6 tokens x 4 completions of at most 6; 4 held-out ones x 2; 2 iterations, 3 evaluations.
    assert text["cost, an iteration"] == (
        "24 prompt tokens, 96 completion tokens at most, 384 scored at most, 192 trained on at most"
    )
    assert text["cost, the whole chain"] == (
        "120 prompt tokens, 336 completion tokens at most, 1.06 k scored at most, 384 trained on at most"
    )
    assert files(project.root) == before


def test_everything_wrong_is_told_in_one_run(project: Project, rloo: CommandLine) -> None:
    shutil.rmtree(project.root / ".dvc")
    graph = (project.root / "dvc.yaml").read_text()
    (project.root / "dvc.yaml").write_text(re.sub(r"\n  history:.*?(?=\n\S)", "", graph, flags=re.DOTALL))
    (project.root / "other.py").write_text(RAISES)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    params = project.params()
    params["rewards"] = [
        {"name": "divides", "function": "other.py:score"},
        {"name": "forgiven", "function": "other.py:score", "on_error": "invalid"},
        {"name": "strict", "function": "other.py:strict"},
        {"name": "clash", "function": "reward.py:score", "kwargs": {"answer": 1}},
        {"name": "absent", "function": "reward.py:nothing"},
        {"name": "service", "url": f"http://127.0.0.1:{port}/"},
        {"name": "model", "model": "./nowhere"},
        {"name": "routed", "function": "reward.py:score", "tasks": ["maths"]},
    ]
    params["rollouts"] |= {"prompts_per_iteration": 100}
    params["evaluate"] |= {"max_tokens": 256, "opponent_column": "human"}
    project.write_params(params)
    outcome = rloo(project, "check")
    assert outcome.code == 2
    told = findings(outcome.stdout)
    for level, where, what in [
        ("error", "dvc", "run `dvc init`"),
        ("error", "dvc.yaml", "no stage history"),
        ("error", "sources", "which `sources` does not list"),
        ("error", "prompts.train", "no column task, which the rewards routed are routed by"),
        ("error", "prompts.eval", "max_tokens is 256, but the policy's context has 256 tokens"),
        ("error", "evaluate.opponent_column", "no column human"),
        ("error", "rollouts.prompts_per_iteration", "is 100, but there are 8 prompts"),
        ("error", "rewards, divides", "ZeroDivisionError"),
        ("warning", "rewards, forgiven", "ZeroDivisionError"),
        ("error", "rewards, strict", "unexpected keyword argument"),
        ("error", "rewards, clash", "answer is a column of the dataset too"),
        ("error", "rewards, absent", "reward.py has no nothing"),
        ("error", "rewards, service", "cannot be connected to"),
        ("error", "rewards, model", "no such directory"),
        ("error", "rewards, routed", "no column task"),
    ]:
        assert any((one, place) == (level, where) and what in text for one, place, text in told), (
            where,
            outcome.stdout,
        )
    assert "Traceback" not in outcome.stdout + outcome.stderr


def test_every_wrong_key_is_told(project: Project, rloo: CommandLine) -> None:
    project.change("rollouts.max_tokens", 0)
    project.change("update.learning_rat", 1)
    outcome = rloo(project, "check")
    assert outcome.code == 2
    errors = [(where, what) for level, where, what in findings(outcome.stdout) if level == "error"]
    assert [where for where, _ in errors] == ["params.yaml", "params.yaml"]
    assert errors[0][1].startswith("rollouts.max_tokens: ")
    assert errors[1][1].startswith("update.learning_rat: there is no such key")


def test_what_yaml_says_of_a_file_is_one_finding(project: Project, rloo: CommandLine) -> None:
    (project.root / "params.yaml").write_text("prompts: {generator: a.py:train}: x")
    told = findings(rloo(project, "check").stdout)
    (text,) = (what for level, where, what in told if (level, where) == ("error", "params.yaml"))
    assert text.startswith("not readable as YAML: ")
    assert "line 1, column" in text


def test_what_the_stages_would_lack(
    project: Project, rloo: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project.root / ".gitignore").write_text("*.lock\n")
    (project.root / "rloo_pipeline" / "algorithms.yaml").unlink()
    shutil.rmtree(project.root / "sources" / "policy")
    rows = [{"prompt": f"{task} {number}", "answer": "a", "task": task} for task in "yx" for number in range(4)]
    (project.root / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (project.root / "eval.jsonl").write_text(json.dumps(rows[-1] | {"prompt": "x"}) + "\n")
    project.change("rewards", [PARAMS["rewards"][0] | {"tasks": ["x", "z"]}])
    (tmp_path / "bin").mkdir()
    for tool in ("git", "dvc"):
        (tmp_path / "bin" / tool).symlink_to(str(shutil.which(tool)))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    told = findings(rloo(project, "check").stdout)
    for level, where, what in [
        ("error", "rloo", "the stages run the command rloo, which PATH does not have"),
        ("warning", "git", "dvc.lock is ignored"),
        ("error", "dvc.yaml", "stages depend on rloo_pipeline/algorithms.yaml, which is not there"),
        ("error", "dvc.yaml", "stages depend on the folder sources/policy, which is not there"),
        ("error", "rewards, letters", "no row of prompts.train has the task z"),
        ("warning", "rewards, letters", "no row of prompts.eval has the task z"),
        ("error", "prompts.train", "4 of 8 prompts have a task that no reward applies to"),
    ]:
        assert any((one, place) == (level, where) and what in text for one, place, text in told), (what, told)
    # The prompts that the reward applies to are those that it is called with.
    assert ("ok", "rewards, letters", "scores of two made-up completions: 0.0555556, 0") in told


def test_what_dvc_could_not_write_back(project: Project, rloo: CommandLine) -> None:
    params = (project.root / "params.yaml").read_text()
    quoted = re.sub(
        r"rewards:\n.*?(?=\n\S)", 'rewards:\n- {name: letters, function: "reward.py:score"}', params, flags=re.DOTALL
    )
    assert quoted != params
    (project.root / "params.yaml").write_text(quoted)
    outcome = rloo(project, "check")
    assert outcome.code == 0
    (text,) = (what for level, _, what in findings(outcome.stdout) if level == "warning")
    assert text.startswith("`dvc exp run -S` writes it anew without quotes")


def test_a_slow_function_is_no_error_as_long_as_the_stage_would_wait(
    project: Project, rloo: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rloo_pipeline.check.rewards.LONGEST_CALL", 0.5)
    (project.root / "reward.py").write_text("import time\n\n\ndef score(**kwargs):\n    time.sleep(600)\n")
    outcome = rloo(project, "check")
    (text,) = (
        what for level, where, what in findings(outcome.stdout) if (level, where) == ("warning", "rewards, letters")
    )
    assert text.endswith("took longer than 0.5 s and was stopped; the stage waits 600 s, so it may be as it should")
    project.change("rewards", [PARAMS["rewards"][0] | {"time_limit": 0.5}])
    outcome = rloo(project, "check")
    assert outcome.code == 2
    assert "error    rewards, letters: reward.py:score took longer than 0.5 s" in outcome.stdout


def test_prompts_that_are_too_long(project: Project, rloo: CommandLine) -> None:
    rows = [{"prompt": letter * 300, "answer": letter} for letter in "ab"] + [{"prompt": "short", "answer": "x"}] * 3
    (project.root / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    outcome = rloo(project, "check")
    told = findings(outcome.stdout)
    assert ("warning", "prompts.train") in [(level, where) for level, where, _ in told]
    (text,) = (what for level, where, what in told if (level, where) == ("warning", "prompts.train"))
    assert "(5): 5 to 300, median 5" in text
    assert "2 of these are left out as too long" in text
    (text,) = (what for _, where, what in told if where == "rollouts.prompts_per_iteration")
    assert "is 4, but there are 3 prompts" in text


def test_a_hub_that_cannot_be_asked(project: Project, rloo: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    project.change("policy.model", "somebody/some-model")
    project.change("prompts.train", {"hub": "somebody/some-data", "split": "train"})
    project.change("sources", {name: PARAMS["sources"][name] for name in ("eval", "reward")})
    outcome = rloo(project, "check")
    assert outcome.code == 0, outcome.stdout
    warnings = {where: what for level, where, what in findings(outcome.stdout) if level == "warning"}
    assert warnings["hub"].startswith("HF_HUB_OFFLINE is set")
    assert "hub dataset somebody/some-data (split train) could not be loaded" in warnings["prompts"]
    assert "neither in the hub's cache nor to be had now" in warnings["policy.model"]
    assert "not called" in warnings["rewards, letters"]


def test_models_of_rewards(project: Project, rloo: CommandLine) -> None:
    config = make_model().config.to_dict() | {"num_labels": 3}
    LlamaForSequenceClassification(LlamaConfig(**config)).save_pretrained(project.root / "scorer")
    make_tokenizer().save_pretrained(project.root / "scorer")
    make_policy(project.root / "judge")
    params = project.params()
    params["sources"] |= {name: {"path": name, "used_by": "rewards"} for name in ("scorer", "judge")}
    ask = "{prompt} {completion} {answer}"
    params["rewards"] = [
        {"name": "which", "model": "scorer"},
        {"name": "chosen", "model": "scorer", "logit": 2},
        {"name": "beyond", "model": "scorer", "logit": 3},
        {"name": "letters", "judge": "judge", "prompt": ask, "token": "good"},
        {"name": "unknown", "judge": "judge", "prompt": ask + "{level}", "token": "g"},
        {"name": "judged", "judge": "judge", "prompt": ask, "pattern": "([0-9])"},
    ]
    project.write_params(params)
    outcome = rloo(project, "check")
    told = findings(outcome.stdout)
    errors = {where.removeprefix("rewards, "): what for level, where, what in told if level == "error"}
    assert set(errors) == {"which", "beyond", "letters", "unknown"}, outcome.stdout
    assert "has 3 logits" in errors["which"]
    assert "is not one token" in errors["letters"]
    assert "no such column" in errors["unknown"]
    assert "Say a: The answer is 42. a" in outcome.stdout
    # The head is 3 x 64 in place of the tied embedding's second use, which has no weights of its own.
    assert look("scorer", None, project.root, "AutoModelForSequenceClassification").parameters == PARAMETERS + 3 * 64


@pytest.mark.parametrize(
    ("context", "level"),
    # The longest held-out prompt that the policy keeps has 20 tokens, and a completion has 6 at most.
    [(26, "ok"), (25, "warning"), (20, "warning"), (19, "error")],
)
def test_context_of_a_reward_model(project: Project, rloo: CommandLine, context: int, level: str) -> None:
    config = make_model().config.to_dict() | {"num_labels": 1, "max_position_embeddings": context}
    LlamaForSequenceClassification(LlamaConfig(**config)).save_pretrained(project.root / "scorer")
    make_tokenizer().save_pretrained(project.root / "scorer")
    rows = [{"prompt": letter * length, "answer": "a"} for letter, length in (("a", 5), ("b", 20), ("c", 255))]
    (project.root / "eval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    params = project.params()
    params["sources"]["scorer"] = {"path": "scorer", "used_by": "rewards"}
    params["rewards"] = [{"name": "short", "model": "scorer"}]
    project.write_params(params)
    outcome = rloo(project, "check")
    told = [(one, what) for one, where, what in findings(outcome.stdout) if where == "rewards, short"]
    assert told[-1] == ("ok", f"scorer: 0.1 M parameters, context {context}")
    if level == "ok":
        assert len(told) == 1, outcome.stdout
    else:
        assert [one for one, _ in told] == [level, "ok"], outcome.stdout
        assert "of the longest prompt looked at of prompts.eval it reads 20 tokens" in told[0][1]
        assert f"about 6 more at most, but it takes {context};" in told[0][1]


def test_the_answer_of_a_judge_must_fit_too(project: Project, rloo: CommandLine) -> None:
    """`{prompt} {completion}`, byte by byte in the tiny tokenizer: 6 + 1, 6 of a completion, and the answer's."""
    for name, context in (("judge", 17), ("forgetful", 16)):
        make_policy(project.root / name)
        (project.root / name / "chat_template.jinja").unlink()
        file = project.root / name / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"max_position_embeddings": context}))
    params = project.params()
    params["sources"] |= {name: {"path": name, "used_by": "rewards"} for name in ("judge", "forgetful")}
    ask = {"prompt": "{prompt} {completion}", "pattern": "([0-9])", "max_tokens": 4}
    params["rewards"] = [{"name": name, "judge": name, **ask} for name in ("judge", "forgetful")]
    project.write_params(params)
    told = findings(rloo(project, "check").stdout)
    assert [(level, where) for level, where, _ in told if level != "ok"] == [("warning", "rewards, forgetful")] * 2
    assert any("but it takes 12;" in what for _, _, what in told)


def test_reward_models_to_be_trained(project: Project, rloo: CommandLine) -> None:
    (project.root / "pairs.jsonl").write_text('{"prompt": "Say a:", "chosen": "a", "rejected": "b"}\n' * 2)
    (project.root / "wrong.jsonl").write_text('{"prompt": "Say a:", "better": "a", "rejected": "b"}\n')
    params = project.params()
    params["sources"] |= {
        name: {"path": path, "used_by": "reward_models"}
        for name, path in (("base", "tiny"), ("pairs", "pairs.jsonl"), ("wrong", "wrong.jsonl"))
    }
    training = {"model": "tiny", "batch_size": 1, "steps": 1, "learning_rate": 1e-3}
    params["reward_models"] = {
        "good": {**training, "train": {"file": "pairs.jsonl"}, "eval": {"fraction": 0.5}},
        "bad": {**training, "train": {"file": "wrong.jsonl"}, "eval": {"fraction": 0.5}},
    }
    params["rewards"] = [{"name": "taste", "model": "artifacts/reward_models/good"}]
    params["sources"]["taste"] = {"path": "artifacts/reward_models/good", "used_by": "rewards"}
    project.write_params(params)
    told = findings(rloo(project, "check").stdout)
    assert ("ok", "reward_models, good", "train: 2 pairs") in told
    assert ("ok", "rewards, taste", "artifacts/reward_models/good: the stage reward_model trains it") in told
    (error,) = ((where, what) for level, where, what in told if level == "error")
    assert error[0] == "reward_models, bad"
    assert "no column chosen" in error[1]


def test_what_is_held_out_and_trained_on_too(project: Project, rloo: CommandLine) -> None:
    shutil.copyfile(project.root / "train.jsonl", project.root / "eval.jsonl")
    pair = '{{"prompt": "Say a:", "chosen": "{}", "rejected": "{}"}}\n'
    (project.root / "pairs.jsonl").write_text(pair.format("a", "b") + pair.format("a", "c"))
    (project.root / "others.jsonl").write_text(pair.format("b", "a") + pair.format("a", "d") + pair.format("a", "e"))
    params = project.params()
    params["sources"] |= {
        name: {"path": path, "used_by": "reward_models"}
        for name, path in (("base", "tiny"), ("pairs", "pairs.jsonl"), ("others", "others.jsonl"))
    }
    training = {"model": "tiny", "batch_size": 1, "steps": 1, "learning_rate": 1e-3}
    params["reward_models"] = {
        "taste": {**training, "train": {"file": "pairs.jsonl"}, "eval": {"file": "others.jsonl"}}
    }
    project.write_params(params)
    outcome = rloo(project, "check")
    assert outcome.code == 0
    assert [(where, what) for level, where, what in findings(outcome.stdout) if level == "warning"] == [
        ("prompts.eval", "8 of 8 prompts are among prompts.train too, so they are not held out"),
        ("reward_models, taste", "1 of 3 held-out pairs are trained on too, so they are not held out"),
    ]


@pytest.fixture
def params() -> Params:
    values: dict[str, Any] = {**PARAMS, "execution": {}}
    return parse_params(values)


def test_memory(params: Params) -> None:
    """By hand, for 16 completions of 6 + 6 tokens: hidden 64, MLP 96, one KV head of 32, vocabulary 258, float32."""
    model = make_model()
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS
    rollouts, logprobs, update = memory.needs(params, PARAMETERS, model.config, 6, "transformers", False)
    assert rollouts.parts == {"weights": 4 * PARAMETERS, "KV cache": 512 * 12 * 16, "logits": 20 * 16 * 258}
    layer = 4 * (8 * 64 + 4 * 32 + 4 * 96)
    # Policy and reference, since there is a second iteration.
    assert logprobs.parts["weights"] == 2 * 4 * PARAMETERS
    assert logprobs.parts["logits"] == 2 * 4 * 192 * 258
    assert update.parts == {
        "weights, gradients and AdamW": 16 * PARAMETERS,
        "activations": 2 * layer * 192,
        "logits": 3 * 4 * 192 * 258,
    }
    (on_gpu, _, _) = memory.needs(params, PARAMETERS, model.config, 6, "vllm", True)
    assert on_gpu.parts == {"weights": 4 * PARAMETERS, "KV cache": 512 * 12}
    # On a CPU vLLM takes the whole cache that execution grants it: 1 GiB.
    (on_cpu, _, _) = memory.needs(params, PARAMETERS, model.config, 6, "vllm", False)
    assert on_cpu.sure == 4 * PARAMETERS + 2**30


def test_a_single_iteration_scores_with_one_model(params: Params) -> None:
    first = params.model_copy(update={"iterations": {"0001": params.iterations["0001"]}})
    (_, logprobs, _) = memory.needs(first, PARAMETERS, make_model().config, 6, "transformers", False)
    assert logprobs.parts["weights"] == 4 * PARAMETERS


@pytest.mark.parametrize(("short_of", "level"), [(0, "ok"), (1, "error")])
def test_disk(
    tmp_path: Path,
    params: Params,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    short_of: int,
    level: str,
) -> None:
    """Two iterations of weights and two moments in float32, and the initial weights: 28 bytes a parameter."""
    usage = shutil.disk_usage(tmp_path)._replace(free=28 * PARAMETERS - short_of)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    disk(Layout(tmp_path), params, PARAMETERS, Report())
    assert capsys.readouterr().out.startswith(f"{level} ")


@pytest.mark.parametrize(("ids", "told"), [([1, 1, 5], True), ([1, 5, 1], False)])
def test_a_prompt_that_begins_twice(capsys: pytest.CaptureFixture[str], ids: list[int], told: bool) -> None:
    twice_begun(Rendered(np.array([0]), ["x"], [ids]), 1, Report())
    assert ("two BOS tokens" in capsys.readouterr().out) is told


def test_memory_is_compared(params: Params, capsys: pytest.CaptureFixture[str]) -> None:
    needs = memory.needs(params, PARAMETERS, make_model().config, 6, "transformers", False)
    compare(needs, Device("small", 2 * 4 * PARAMETERS + 1, is_gpu=True), Report())
    levels = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert levels == ["ok", "warning", "error"]


def test_cost_of_prompts_in_surplus(params: Params) -> None:
    rollouts = params.rollouts.model_copy(update={"oversample": 1.5})
    update = params.update.model_copy(update={"epochs": 2})
    cost = tokens.iteration(params.model_copy(update={"rollouts": rollouts, "update": update}), 10.0)
    # 6 prompts x 4 completions x (10 + 6) tokens, scored twice; 4 of the 6 groups trained on, twice.
    assert cost == tokens.Cost(prompts=60, sampled=144, scored=768, trained=512)
