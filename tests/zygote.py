"""Stages in processes that are forked with everything imported, and killed before any file operation of theirs.

Run as a module it is the process that forks: one JSON request a line on standard input, one JSON answer each.
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.project import REPOSITORY, Project, environment

MODULES = (
    "rloo_pipeline.cli",
    *(f"rloo_pipeline.stages.{name}" for name in ("dispatch", "prepare", "rollouts", "logprobs", "rewards")),
    *(f"rloo_pipeline.stages.{name}" for name in ("advantages", "update", "evaluate", "sources")),
    "rloo_pipeline.engines.transformers",
    "rloo_pipeline.history",
    "rloo_pipeline.policy.trainer_state",
    "torch",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "transformers.models.llama.tokenization_llama",
    "transformers.generation.utils",
    "psutil",
    "ruamel.yaml",
)
CHANGES = ("os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.truncate", "shutil.copyfile")


@dataclass(frozen=True)
class Run:
    """How a stage's process ended (negative: the signal), what it wrote, and the file operations that it began."""

    code: int
    log: str
    events: list[tuple[str, str]]

    def renames(self) -> list[int]:
        """The numbers of the renames among the events."""
        return [number for number, (name, _) in enumerate(self.events) if name == "os.rename"]


class Zygote:
    """Forks a process for each stage."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        # Threads are set before torch is imported, as a stage's own process does from execution.threads.
        env = environment(OMP_NUM_THREADS="1", PYTHONPATH=str(REPOSITORY), PYTHONDONTWRITEBYTECODE="1")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.zygote"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env,
            cwd=folder,
        )  # fmt: skip

    def run(self, project: Project, *arguments: str, stop: int | None = None, signal: int = 9) -> Run:
        """Run `rloo` with the arguments, with a signal to it before the file operation of number `stop`."""
        log, events = self.folder / "log", self.folder / "events"
        request = {
            "root": str(project.root), "arguments": arguments, "stop": stop, "signal": signal,
            "log": str(log), "events": str(events),
        }  # fmt: skip
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        code = json.loads(self.process.stdout.readline())
        return Run(code, log.read_text(), [tuple(json.loads(line)) for line in events.read_text().splitlines()])

    def close(self) -> None:
        """End the process that forks."""
        self.process.communicate("")


def _operation(name: str, arguments: tuple[Any, ...]) -> str | None:
    """The path that an audit event is about to change; None for any other event."""
    if name == "open":
        path, mode, flags = arguments
        writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) if mode is None else set(mode) & set("wax+")
    else:
        path, writes = arguments[0] if arguments else None, name in CHANGES
    return os.fsdecode(path) if writes and isinstance(path, str | bytes | os.PathLike) else None


def _watch(request: dict[str, Any]) -> None:
    """Count the file operations below the project, and send the signal before the one of number `stop`."""
    root, count = request["root"], 0
    events = os.open(request["events"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)

    def hook(name: str, arguments: tuple[Any, ...]) -> None:
        nonlocal count
        path = _operation(name, arguments)
        if path is None:
            return
        path = os.path.normpath(os.path.join(root, path))  # noqa: PTH118
        if path.startswith(root):
            os.write(events, (json.dumps([name, os.path.relpath(path, root)]) + "\n").encode())
            count += 1
            if count - 1 == request["stop"]:
                os.kill(os.getpid(), request["signal"])

    sys.addaudithook(hook)


def _stage(request: dict[str, Any]) -> None:
    from rloo_pipeline.cli import main

    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(request["root"])
    sys.argv = ["rloo", *request["arguments"]]
    _watch(request)
    main()


def serve() -> None:
    """Fork a process for each request and answer with its exit status."""
    for name in MODULES:
        __import__(name)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            # Ends through SystemExit as a stage's own process does, only without the parent's clean-up.
            try:
                _stage(json.loads(line))
                code = 0
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else int(end.code is not None)
            except BaseException:
                sys.excepthook(*sys.exc_info())
                code = 1
            sys.stderr.flush()
            os._exit(code)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    serve()
