"""Which MLflow runs this project has had, kept in its folder outside git: .rloo/runs.json."""

import fcntl
import os
import subprocess
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rloo_pipeline import fingerprint
from rloo_pipeline.errors import UserError
from rloo_pipeline.files import write_json
from rloo_pipeline.layout import Layout
from rloo_pipeline.tracking.outdated import read_json

PREFECT_VARIABLES = ("RLOO_PREFECT_FLOW_RUN_ID", "PREFECT__FLOW_RUN_ID")
REMEDY = "remove it, then `rloo track`"


@dataclass(frozen=True)
class Link:
    """What was there at one moment: git's revision, the flow run that was going on, the hash of dvc.lock."""

    git_revision: str | None = None
    prefect_run: str | None = None
    dvc_lock: str | None = None


@dataclass
class Run:
    """One MLflow run, the moments it was written to, and the md5 of the metrics files it holds."""

    store: str
    experiment_id: str
    run_id: str
    links: list[Link] = field(default_factory=list)
    metrics: dict[str, str] = field(default_factory=dict)

    def add(self, link: Link) -> None:
        """Note a moment; a later one of the same revision and flow run takes the place of the earlier."""
        key = (link.git_revision, link.prefect_run)
        self.links = [*(old for old in self.links if (old.git_revision, old.prefect_run) != key), link]


def read_runs(layout: Layout) -> list[Run]:
    """The runs of this project, the latest last; raises UserError if the file is broken."""
    path = _path(layout)
    rows = read_json(path, REMEDY).get("runs", [])
    try:
        return [Run(**{**row, "links": [Link(**link) for link in row["links"]]}) for row in rows]
    except (KeyError, TypeError) as error:
        raise UserError(f"{path}: not the notes that tracking makes ({error}); {REMEDY}") from error


def write_runs(layout: Layout, runs: list[Run]) -> None:
    """Keep the runs, the latest last."""
    write_json(_path(layout), {"runs": [asdict(run) for run in runs]})


def project_id(layout: Layout, known: str | None = None) -> str:
    """Who the project is to stores that it shares with others: drawn once unless known; it moves with the folder."""
    path = layout.state / "project.json"
    if not path.exists():
        write_json(path, {"id": known or uuid.uuid4().hex})
    found = read_json(path, REMEDY).get("id")
    if not isinstance(found, str):
        raise UserError(f"{path}: holds no id; {REMEDY}")
    return found


@contextmanager
def writing(layout: Layout) -> Iterator[None]:
    """One writer at a time: two would make two runs."""
    layout.state.mkdir(parents=True, exist_ok=True)
    with (layout.state / "tracking.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _path(layout: Layout) -> Path:
    return layout.state / "runs.json"


def git(layout: Layout, *arguments: str) -> str | None:
    """What git prints in the project, None if it fails or is not there."""
    try:
        done = subprocess.run(["git", *arguments], cwd=layout.root, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout if done.returncode == 0 else None


def present(layout: Layout, lock: Mapping[str, Any] | None) -> Link:
    """The present moment; lock: the parsed dvc.lock, if it is whole."""
    prefect = next((os.environ[name] for name in PREFECT_VARIABLES if os.environ.get(name)), None)
    revision = (git(layout, "rev-parse", "HEAD") or "").strip() or None
    return Link(revision, prefect, lock_hash(lock) if lock else None)


def parse_lock(text: str) -> dict[str, Any]:
    """dvc.lock, parsed."""
    from ruamel.yaml import YAML

    lock: dict[str, Any] | None = YAML(typ="safe").load(text)
    return lock or {}


def read_lock(layout: Layout) -> dict[str, Any]:
    """The project's dvc.lock, empty if there is none."""
    path = layout.root / "dvc.lock"
    return parse_lock(path.read_text(encoding="utf-8")) if path.exists() else {}


def lock_hash(lock: Mapping[str, Any]) -> str:
    """SHA-256 of the content of dvc.lock; the order in which stages ran does not count."""
    return fingerprint.of_json(lock)


def lock_outputs(lock: Mapping[str, Any]) -> dict[str, str]:
    """DVC's hash of every output that dvc.lock records, by path."""
    return {out["path"]: out["md5"] for stage in lock.get("stages", {}).values() for out in stage.get("outs", ())}


def agreeing(metrics: Mapping[str, str], outputs: Mapping[str, str]) -> int:
    """How many of a run's metrics files (md5 by path) dvc.lock's outputs hold; 0 if one of them differs."""
    common = metrics.keys() & outputs.keys()
    return len(common) if all(metrics[path] == outputs[path] for path in common) else 0
