"""A project of one's own, started from an example: its files, its DVC graph, git and DVC set up."""

import shutil
import subprocess
import tempfile
from importlib import resources
from pathlib import Path
from typing import get_args

from rloo_pipeline import algorithms
from rloo_pipeline.config import SourceConfig
from rloo_pipeline.disk import refusals_told
from rloo_pipeline.errors import UserError

EXAMPLES = Path(str(resources.files("rloo_pipeline"))) / "examples"
PROJECT = Path(str(resources.files("rloo_pipeline"))) / "project"
MAY_BE_THERE = {".git", ".venv"}  # a fresh repository and the environment that the package was installed into
SHOWN = 5
SOURCES = "Records of the files that params.yaml lists under sources are kept in this folder.\n"
TEMPLATES = {
    "stages.yaml": "dvc.yaml",  # under its own name DVC would take it for a part of the repository's project
    "gitignore": ".gitignore",
    "dvcignore": ".dvcignore",
    "dvc_config": ".dvc/config",
    "dvc_gitignore": ".dvc/.gitignore",
    "prefect.yaml": "prefect.yaml",
}


def examples() -> dict[str, str]:
    """Names of the examples, each with what the first line of its README says it is."""
    folders = sorted(path.parent for path in EXAMPLES.glob("*/params.yaml"))
    return {folder.name: _title(folder / "README.md").removeprefix(f"{folder.name}: ") for folder in folders}


def start(target: Path, example: str | None) -> None:
    """Make the project and say what comes next; raises UserError, and leaves nothing, if it cannot be made there."""
    source = EXAMPLES / _known(example)
    _check_free(target)
    with refusals_told(target):
        place = target if target.exists() else target.parent
        place.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=".rloo-init-", dir=place))
        try:
            _fill(work, source)
            inside = _set_up_git(work)
            _move(work, target)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    _tell(target, source.name, inside)


def _known(example: str | None) -> str:
    known = examples()
    if example in known:
        return str(example)
    wrong = "name the example to start from" if example is None else f"{example}: there is no such example"
    listed = "\n".join(f"  --example {name:<12} {title}" for name, title in known.items())
    raise UserError(f"{wrong}; there are\n{listed}")


def _title(readme: Path) -> str:
    return readme.read_text(encoding="utf-8").splitlines()[0].lstrip("# ")


def _check_free(target: Path) -> None:
    if target.exists() and not target.is_dir():
        raise UserError(f"{target}: is a file; name a new or an empty folder")
    there = sorted({path.name for path in target.iterdir()} - MAY_BE_THERE) if target.exists() else []
    if there:
        more = f" and {len(there) - SHOWN} more" if len(there) > SHOWN else ""
        raise UserError(f"{target}: holds {', '.join(there[:SHOWN])}{more}; name a new or an empty folder")


def _fill(work: Path, source: Path) -> None:
    for path in source.iterdir():
        if path.is_file():
            shutil.copyfile(path, work / path.name)
    (work / ".dvc").mkdir()
    for name, place in TEMPLATES.items():
        with (work / place).open("ab") as file:  # an example may have a .gitignore of its own, which goes first
            file.write((PROJECT / name).read_bytes())
    for used_by in get_args(SourceConfig.model_fields["used_by"].annotation):
        folder = work / "sources" / used_by
        folder.mkdir(parents=True)
        (folder / "README").write_text(SOURCES, encoding="utf-8")
    algorithms.refresh(work)


def _set_up_git(work: Path) -> Path | None:
    """Make a git repository, unless there is one around; returns the one that is."""
    try:
        around = _git(work, "rev-parse", "--show-toplevel")
        if around is None and _git(work, "init", "--quiet") is None:
            raise UserError("`git init` failed; run it by hand to see why")
    except FileNotFoundError as error:
        raise UserError("git is not installed; a project's history is kept with it, so install it first") from error
    return None if around is None else Path(around.strip())


def _git(folder: Path, *arguments: str) -> str | None:
    done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else None


def _move(work: Path, target: Path) -> None:
    work.chmod(0o755)  # temporary folders are closed to others
    if not target.exists():
        work.rename(target)
        return
    for path in work.iterdir():
        path.rename(target / path.name)


def _tell(target: Path, example: str, inside: Path | None) -> None:
    around = "" if inside is None or inside == target.resolve() else f", as a part of the git repository {inside}"
    print(f"{target}: a project from the example {example}, with git and DVC set up{around}; nothing is committed yet")
    print("README.md says what it is and what it needs. What comes next:")
    enter = [] if target.resolve() == Path.cwd() else [f"cd {target}"]
    first = 'git add . && git commit -m "Start the project"'
    for command in [*enter, "rloo check", "dvc repro", "rloo table", first]:
        print(f"  {command}")
