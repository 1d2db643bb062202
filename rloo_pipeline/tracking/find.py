"""Which git revision, dvc.lock, Prefect run and MLflow run belong together."""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rloo_pipeline.errors import UserError
from rloo_pipeline.layout import Layout
from rloo_pipeline.tracking.book import (
    Link,
    Run,
    agreeing,
    git,
    lock_hash,
    parse_lock,
    read_lock,
    read_runs,
)
from rloo_pipeline.tracking.store import DATABASE, DEFAULT, address, connected, told

SHORTEST = 7  # characters of an id that are enough


@dataclass(frozen=True)
class Found:
    """The four that belong together; None where nothing is known."""

    git_revision: str | None
    dvc_lock: str | None
    prefect_run: str | None
    mlflow_run: str

    def lines(self) -> list[str]:
        """One line for each, as the command prints them."""
        named = {
            "git revision": self.git_revision,
            "dvc.lock": self.dvc_lock,
            "Prefect run": self.prefect_run,
            "MLflow run": self.mlflow_run,
        }
        return [f"{name:13} {value or '-'}" for name, value in named.items()]


def find(layout: Layout, text: str) -> Found:
    """What belongs to a git revision, a hash of dvc.lock, a Prefect run or an MLflow run (each may be shortened).

    A dvc.lock belongs to the run that holds the metrics files which it names. Raises UserError if nothing does.
    """
    wanted, runs = text.strip().lower(), read_runs(layout)
    found = _by_id(layout, runs, wanted) or _by_revision(layout, runs, text.strip()) or _by_lock(layout, runs, wanted)
    found = found or _ask_mlflow(layout, wanted)
    if found is None:
        raise UserError(
            f"{text}: no git revision, dvc.lock, Prefect run or MLflow run that this project knows; "
            "`rloo track` records what is there now"
        )
    return found


def _by_id(layout: Layout, runs: Iterable[Run], wanted: str) -> Found | None:
    if len(wanted) < SHORTEST:
        return None
    for run in reversed(list(runs)):
        for link in reversed(run.links):
            if any(value and value.startswith(wanted) for value in (run.run_id, link.prefect_run, link.dvc_lock)):
                return _complete(layout, run, link)
    return None


def _complete(layout: Layout, run: Run, link: Link) -> Found:
    lock = link.dvc_lock
    if link == run.links[-1] and agreeing(run, working := read_lock(layout)):
        lock = lock_hash(working)
    committed = _lock_at(layout, link.git_revision) if link.git_revision else {}
    if lock is None and agreeing(run, committed):
        lock = lock_hash(committed)
    return Found(_revision_of(layout, lock) or link.git_revision, lock, link.prefect_run, run.run_id)


def _by_revision(layout: Layout, runs: list[Run], text: str) -> Found | None:
    revision = (git(layout, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{text}^{{commit}}") or "").strip()
    if not revision:
        return None
    lock = _lock_at(layout, revision)
    during = [run for run in runs if any(link.git_revision == revision for link in run.links)]
    run = _run_of(runs, lock) or (during[-1] if during else None)
    if run is None:
        return None
    return Found(revision, lock_hash(lock) if lock else None, _prefect_of(run, revision, lock), run.run_id)


def _by_lock(layout: Layout, runs: list[Run], wanted: str) -> Found | None:
    """By the hash of the content, or of the file as sha256sum has it; that of now or one that git knows."""
    path = layout.root / "dvc.lock"
    texts: list[tuple[str | None, str]] = [(None, path.read_text(encoding="utf-8"))] if path.exists() else []
    texts += [(revision, git(layout, "show", f"{revision}:./dvc.lock") or "") for revision in _revisions(layout)]
    for revision, text in texts:
        lock = parse_lock(text)
        hashes = (lock_hash(lock), hashlib.sha256(text.encode()).hexdigest())
        run = _run_of(runs, lock)
        if run is not None and len(wanted) >= SHORTEST and any(item.startswith(wanted) for item in hashes):
            known = revision or _revision_of(layout, hashes[0])
            return Found(known or run.links[-1].git_revision, hashes[0], _prefect_of(run, known, lock), run.run_id)
    return None


def _prefect_of(run: Run, revision: str | None, lock: Mapping[str, Any]) -> str | None:
    """The flow run at that dvc.lock or revision, else the run's latest."""
    links = [link for link in reversed(run.links) if link.prefect_run]
    same = [link for link in links if link.dvc_lock == lock_hash(lock)]
    same += [link for link in links if link.git_revision == revision]
    return next((link.prefect_run for link in [*same, *links]), None)


def _run_of(runs: Iterable[Run], lock: Mapping[str, Any]) -> Run | None:
    """The run with the most metrics files of this dvc.lock and none that differs, the latest of equals."""
    found = [(count, index, run) for index, run in enumerate(runs) if (count := agreeing(run, lock))]
    return max(found)[2] if found else None


def _revisions(layout: Layout) -> list[str]:
    return (git(layout, "log", "--all", "--max-count=100", "--format=%H", "--", "dvc.lock") or "").split()


def _revision_of(layout: Layout, wanted: str | None) -> str | None:
    """The latest revision whose dvc.lock has this hash."""
    if wanted is None:
        return None
    return next((item for item in _revisions(layout) if lock_hash(_lock_at(layout, item)) == wanted), None)


def _lock_at(layout: Layout, revision: str) -> dict[str, Any]:
    return parse_lock(git(layout, "show", f"{revision}:./dvc.lock") or "")


def _ask_mlflow(layout: Layout, wanted: str) -> Found | None:
    """From the tags of the runs in the store, for a project whose folder knows nothing of them."""
    if len(wanted) < SHORTEST or not re.fullmatch(r"[0-9a-f-]+", wanted):
        return None
    if address() == DEFAULT and not (layout.root / DATABASE).exists():
        return None
    with told(), connected(layout) as store:
        client, where = store.client, [store.experiment_id]
        found = client.search_runs(where, filter_string=f"tags.`rloo.links` LIKE '%{wanted}%'", max_results=1)
        found = found or client.search_runs(where, filter_string=f"attributes.run_id = '{wanted}'", max_results=1)
    if not found:
        return None
    links = json.loads(found[0].data.tags.get("rloo.links", "[]")) or [[None, None, None]]
    link = next((link for link in links if any(item and item.startswith(wanted) for item in link)), links[0])
    return Found(link[0], link[2], link[1], found[0].info.run_id)
