"""Which git revision, dvc.lock, Prefect run and MLflow run belong together."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from rloo_pipeline.errors import UserError
from rloo_pipeline.layout import Layout
from rloo_pipeline.tracking.book import Link, Run, agreeing, git, read_runs
from rloo_pipeline.tracking.locks import Lock, Locks
from rloo_pipeline.tracking.projection import LINKS, noted_run
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


@dataclass(frozen=True)
class Meant:
    """What a text given to `find` may mean: an id, a git revision with its dvc.lock, a dvc.lock."""

    text: str
    revision: str | None
    lock: Lock | None


def find(layout: Layout, text: str) -> Found:
    """What belongs to a git revision, a hash of dvc.lock, a Prefect run or an MLflow run (each may be shortened).

    A dvc.lock belongs to the MLflow run that holds the metrics files which it names, and to the flow run that was the
    first to end with it. Raises UserError if nothing is known.
    """
    wanted, locks = text.strip(), Locks(layout)
    runs = [_settled(run, locks) for run in read_runs(layout)]
    found = _by_id(locks, runs, wanted.lower())
    if found is None:
        meant = _meant(layout, locks, wanted)
        found = _by_lock(locks, runs, meant) or _by_revision(runs, meant)
        if found is None:
            runs = _ask_mlflow(layout, meant)
            found = _by_id(locks, runs, meant.text) or _by_lock(locks, runs, meant) or _by_revision(runs, meant)
    if found is None:
        raise UserError(
            f"{text}: no git revision, dvc.lock, Prefect run or MLflow run that this project knows; "
            "`rloo track` records what is there now"
        )
    return found


def _settled(run: Run, locks: Locks) -> Run:
    """The run with the dvc.lock of now for its last moment, if a stage noted it, which could not know the lock."""
    if not run.links or run.links[-1].dvc_lock is not None:
        return run
    lock = locks.working()
    if lock is None or not agreeing(run.metrics, lock.metrics):
        return run
    return replace(run, links=[*run.links[:-1], replace(run.links[-1], dvc_lock=lock.content)])


def _by_id(locks: Locks, runs: list[Run], wanted: str) -> Found | None:
    if len(wanted) < SHORTEST:
        return None
    for run in reversed(runs):
        if run.run_id.startswith(wanted):
            return _of_run(locks, runs, run)
        for link in reversed(run.links):
            if link.prefect_run and link.prefect_run.startswith(wanted):
                revision = _revision_of(locks, link.dvc_lock) or link.git_revision
                return Found(revision, link.dvc_lock, link.prefect_run, run.run_id)
    return None


def _of_run(locks: Locks, runs: list[Run], run: Run) -> Found:
    """The latest state of a run: that of its last moment, else the latest in git that belongs to it."""
    link = run.links[-1] if run.links else Link()
    if link.dvc_lock is None:
        for revision, lock in locks.committed():
            if _run_of(runs, lock) is run:
                return Found(revision, lock.content, _prefect_of(run, lock.content), run.run_id)
    prefect = _prefect_of(run, link.dvc_lock) or link.prefect_run
    return Found(_revision_of(locks, link.dvc_lock) or link.git_revision, link.dvc_lock, prefect, run.run_id)


def _by_lock(locks: Locks, runs: list[Run], meant: Meant) -> Found | None:
    noted = [(link.dvc_lock, link.git_revision) for run in reversed(runs) for link in run.links if link.dvc_lock]
    hashes = (lock for lock, _ in noted if len(meant.text) >= SHORTEST and lock.startswith(meant.text))
    content = meant.lock.content if meant.lock else next(hashes, None)
    if content is None:
        return None
    linked = [run for run in runs if any(link.dvc_lock == content for link in run.links)]
    run = (_run_of(runs, meant.lock) if meant.lock else None) or (linked[-1] if linked else None)
    if run is None:
        return None
    during = (revision for lock, revision in noted if lock == content)
    revision = meant.revision or _revision_of(locks, content) or next(during, None)
    return Found(revision, content, _prefect_of(run, content), run.run_id)


def _by_revision(runs: list[Run], meant: Meant) -> Found | None:
    """By the revision at which a run was written to: its dvc.lock is another's, or there is none."""
    if meant.revision is None:
        return None
    during = [run for run in runs if any(link.git_revision == meant.revision for link in run.links)]
    lock = meant.lock.content if meant.lock else None
    return Found(meant.revision, lock, None, during[-1].run_id) if during else None


def _meant(layout: Layout, locks: Locks, text: str) -> Meant:
    """A hash of dvc.lock is that of its content, or of the file as sha256sum has it; of now or in git."""
    revision = (git(layout, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{text}^{{commit}}") or "").strip()
    if revision:
        return Meant(text.lower(), revision, locks.at(revision))
    wanted = text.lower()
    if len(wanted) >= SHORTEST and re.fullmatch(r"[0-9a-f]+", wanted):
        for lock in (locks.working(), *(lock for _, lock in locks.committed())):
            if lock and (lock.content.startswith(wanted) or lock.file.startswith(wanted)):
                return Meant(wanted, None, lock)
    return Meant(wanted, None, None)


def _prefect_of(run: Run, lock: str | None) -> str | None:
    """The first flow run that ended with this dvc.lock: later ones found nothing to do."""
    return next((link.prefect_run for link in run.links if link.prefect_run and link.dvc_lock == lock), None)


def _run_of(runs: Iterable[Run], lock: Lock) -> Run | None:
    """The run with the most metrics files of this dvc.lock and none that differs, the latest of equals."""
    found = [(count, index, run) for index, run in enumerate(runs) if (count := agreeing(run.metrics, lock.metrics))]
    return max(found)[2] if found else None


def _revision_of(locks: Locks, wanted: str | None) -> str | None:
    """The latest revision whose dvc.lock has this hash."""
    if wanted is None:
        return None
    return next((revision for revision, lock in locks.committed() if lock.content == wanted), None)


def _ask_mlflow(layout: Layout, meant: Meant) -> list[Run]:
    """The runs in the store whose tags or ids tell of it, for a project whose folder knows nothing of them."""
    texts = [meant.text] if len(meant.text) >= SHORTEST and re.fullmatch(r"[0-9a-f-]+", meant.text) else []
    filters = [f"attributes.run_id LIKE '{text}%'" for text in texts]
    texts += [text for text in (meant.revision, meant.lock and meant.lock.content) if text]
    filters += [f"tags.`{LINKS}` LIKE '%{text}%'" for text in texts]
    if not filters or (address(layout) == DEFAULT and not (layout.root / DATABASE).exists()):
        return []
    runs = {}
    with told(layout), connected(layout) as store:
        for text in filters:
            for found in store.client.search_runs([store.experiment_id], text, order_by=["attributes.start_time ASC"]):
                runs[found.info.run_id] = noted_run(store, found)
    return list(runs.values())
