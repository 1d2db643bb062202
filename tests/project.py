"""A whole project around the tiny model, for tests that run real stages."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from tests.tiny import make_policy

REPOSITORY = Path(__file__).parent.parent

REWARD = '''
def score(completions, answer, **kwargs):
    """Share of the completion's characters that are the answer's."""
    texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    return [sum(ch in right for ch in text) / (len(text) + 1) for text, right in zip(texts, answer)]
'''

PARAMS: dict[str, Any] = {
    "seed": 3,
    "iterations": {
        "0001": {"previous": "0000", "reference": "0000"},
        "0002": {"previous": "0001", "reference": "0000"},
    },
    "sources": {
        "policy": {"path": "tiny", "used_by": "policy"},
        "train": {"path": "train.jsonl", "used_by": "prompts"},
        "eval": {"path": "eval.jsonl", "used_by": "prompts"},
        "reward": {"path": "reward.py", "used_by": "rewards"},
    },
    "policy": {"model": "tiny"},
    "reward_models": {},
    "prompts": {"train": {"file": "train.jsonl"}, "eval": {"file": "eval.jsonl"}},
    "rollouts": {
        "engine": "transformers",
        "completions_per_prompt": 4,
        "prompts_per_iteration": 4,
        "max_tokens": 6,
        "prompts_per_shard": 2,
    },
    "logprobs": {"reference": True},
    "rewards": [{"name": "letters", "function": "reward.py:score"}],
    "advantages": {"beta": 0.05},
    "update": {"learning_rate": 1e-3},
    "evaluate": {"engine": "transformers", "samples_per_prompt": 2, "max_tokens": 6, "pass_threshold": 0.2},
    "execution": {"threads": 1, "tracking": False},
}


def environment(**extra: str) -> dict[str, str]:
    """The environment of a user's shell: this interpreter's scripts first, no hub, no test runner's variables."""
    scripts = str(Path(sys.executable).parent)
    keep = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST", "DVC_"))}
    return {**keep, "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}", "HF_HUB_OFFLINE": "1", **extra}


class Project:
    """A project's folder with the commands that a user types in it."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @classmethod
    def create(cls, root: Path) -> "Project":
        """A new project: tiny policy, eight train and four held-out prompts, a reward file, git and DVC."""
        root.mkdir(parents=True)
        make_policy(root / "tiny")
        rows = [{"prompt": f"Say {letter}:", "answer": letter} for letter in "abcdefghijkl"]
        (root / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:8]))
        (root / "eval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[8:]))
        (root / "reward.py").write_text(REWARD)
        for name in ("dvc.yaml", ".dvcignore", ".gitignore"):
            shutil.copyfile(REPOSITORY / name, root / name)
        shutil.copytree(REPOSITORY / "sources", root / "sources", ignore=lambda *_: ["*.json"])
        shutil.copytree(REPOSITORY / ".dvc", root / ".dvc", ignore=shutil.ignore_patterns("cache", "tmp"))
        (root / "rloo_pipeline").mkdir()
        shutil.copyfile(REPOSITORY / "rloo_pipeline" / "algorithms.yaml", root / "rloo_pipeline" / "algorithms.yaml")
        project = cls(root)
        project.write_params(PARAMS)
        project.run("git", "init", "-q")
        return project

    def copy(self, root: Path) -> "Project":
        """The same project in another folder, with whatever it has made so far."""
        shutil.copytree(self.root, root, symlinks=True)
        return Project(root)

    def write_params(self, params: dict[str, Any]) -> None:
        """Write params.yaml."""
        with (self.root / "params.yaml").open("w") as file:
            YAML().dump(params, file)

    def params(self) -> dict[str, Any]:
        """What params.yaml says."""
        return YAML(typ="safe").load((self.root / "params.yaml").read_text())

    def change(self, path: str, value: Any) -> None:
        """Set one value of params.yaml by its dotted path."""
        params = self.params()
        *parents, last = path.split(".")
        section = params
        for key in parents:
            section = section[key]
        section[last] = value
        self.write_params(params)

    def run(self, *command: str, check: bool = True, **extra: str) -> subprocess.CompletedProcess[str]:
        """Run a command in the project; with `check`, fail with its output if it fails."""
        done = subprocess.run(
            command, cwd=self.root, env=environment(**extra), capture_output=True, text=True, timeout=1500, check=False
        )
        if check and done.returncode:
            raise AssertionError(f"{' '.join(command)} exited with {done.returncode}:\n{done.stdout}\n{done.stderr}")
        return done

    def rloo(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run the command line of the package."""
        return self.run("rloo", *arguments, check=check)

    def repro(self, *arguments: str) -> list[str]:
        """`dvc repro`; returns the commands of the stages that ran, in order."""
        done = self.run("dvc", "repro", *arguments)
        return [line.removeprefix("> ") for line in done.stdout.splitlines() if line.startswith("> ")]

    def json(self, path: str) -> Any:
        """A JSON file of the project."""
        return json.loads((self.root / path).read_text())

    def lock(self) -> Any:
        """dvc.lock, parsed."""
        return YAML(typ="safe").load((self.root / "dvc.lock").read_text())
