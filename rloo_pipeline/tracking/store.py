"""The MLflow store of a project: its address, its experiment, and artifacts that move with the project."""

import logging
import os
import re
import sqlite3
import textwrap
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rloo_pipeline.errors import UserError
from rloo_pipeline.layout import Layout
from rloo_pipeline.tracking.secrets import hide_in_url

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

DATABASE = "mlflow.db"
SQLITE = "sqlite:///"
DEFAULT = f"{SQLITE}{DATABASE}"
EXPERIMENT = "rloo"
ARTIFACTS = "mlartifacts"
KIND = {"mlflow.experimentKind": "custom_model_development"}  # else the UI opens with its pages for chat agents
# The client's own patience is minutes: a stage must not wait that long for a server that is down.
ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "5",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",  # the address may hold a password
}
# What the client says of a server that it cannot talk to.
UNANSWERED = re.compile(r"Max retries exceeded|failed with (?:timeout )?exception")
CAUSE = re.compile(
    r"Connection refused|timed out|Failed to resolve '[^']*'|too many \d+ error responses", re.IGNORECASE
)


@dataclass(frozen=True)
class Store:
    """A reachable store and the project's experiment in it."""

    client: "MlflowClient"
    address: str  # as it may be told: without credentials, the default one relative to the project
    experiment_id: str

    @property
    def remote(self) -> bool:
        """Whether every question is a request over the network."""
        return self.address.startswith("http")


@contextmanager
def told(layout: Layout) -> Iterator[None]:
    """Raise what goes wrong with the store as a UserError that names it."""
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except (MlflowException, SQLAlchemyError, sqlite3.Error, OSError) as error:
        raise UserError(f"mlflow at {address(layout)}: {reason(error)}; see MLFLOW_TRACKING_URI") from error


def reason(error: Exception) -> str:
    """An error in one line, without the passwords that its addresses may hold."""
    text = str(error).strip() or type(error).__name__
    if UNANSWERED.search(text):
        cause = CAUSE.search(text)
        return f"does not answer ({cause[0]})" if cause else "does not answer"
    return textwrap.shorten(hide_in_url(text.splitlines()[0]), 300, placeholder=" ...")


def address(layout: Layout) -> str:
    """The store that MLFLOW_TRACKING_URI names, else the project's own: one text for each store, fit to be told.

    A database in the project's folder is named relative to it, so that it stays the same store when the folder moves.
    """
    uri = os.environ.get("MLFLOW_TRACKING_URI") or DEFAULT
    if not uri.startswith(SQLITE):
        return hide_in_url(uri.rstrip("/"))
    root, database = layout.root.resolve(), _database(layout)
    place = database.relative_to(root) if database.is_relative_to(root) else database
    return f"{SQLITE}{place}"


def _database(layout: Layout) -> Path:
    """The database's file; MLflow takes a relative one as relative to the present directory."""
    uri = os.environ.get("MLFLOW_TRACKING_URI")
    return Path(uri.removeprefix(SQLITE)).resolve() if uri else layout.root.resolve() / DATABASE


@contextmanager
def connected(layout: Layout) -> Iterator[Store]:
    """The store, its experiment made if it is new; raises whatever MLflow raises if it cannot be reached."""
    given, name, root = os.environ.get("MLFLOW_TRACKING_URI"), address(layout), layout.root.resolve()
    uri = given or f"{SQLITE}{root / DATABASE}"
    for key, value in ENVIRONMENT.items():
        os.environ.setdefault(key, value)
    database = _database(layout) if uri.startswith(SQLITE) else None
    if database is not None and database.exists() and database.is_relative_to(root):
        _move_artifacts(database)
    import mlflow

    if "MLFLOW_LOGGING_LEVEL" not in os.environ:
        logging.getLogger("mlflow").setLevel(logging.WARNING)
    mlflow.set_tracking_uri(uri)  # the registry looks models up there, whatever the client's address
    try:
        client = mlflow.MlflowClient(uri)
        yield Store(client, name, _experiment(client, database))
    finally:
        mlflow.set_tracking_uri(None)  # type: ignore[arg-type]
        os.environ.pop("MLFLOW_TRACKING_URI", None)
        if given is not None:
            os.environ["MLFLOW_TRACKING_URI"] = given


def _name() -> str:
    return os.environ.get("MLFLOW_EXPERIMENT_NAME") or EXPERIMENT


def _experiment(client: "MlflowClient", database: Path | None) -> str:
    """The id of the experiment; that of a database has its artifacts beside the database."""
    experiment = client.get_experiment_by_name(_name())
    if experiment is not None and experiment.lifecycle_stage == "deleted":
        restore = f"`mlflow experiments restore --experiment-id {experiment.experiment_id}`"
        raise UserError(f"the experiment {_name()} was deleted: {restore}, or name another in MLFLOW_EXPERIMENT_NAME")
    if experiment is not None:
        return str(experiment.experiment_id)
    location = None if database is None else str(database.parent / ARTIFACTS)
    return str(client.create_experiment(_name(), artifact_location=location, tags=KIND))


def _move_artifacts(database: Path) -> None:
    """Tell a database that was moved where its artifacts are now: MLflow stores absolute paths alone."""
    target = str(database.parent / ARTIFACTS)
    places = (
        ("experiments", "artifact_location"),
        ("runs", "artifact_uri"),
        ("logged_models", "artifact_location"),
        ("model_versions", "storage_location"),
    )
    with closing(sqlite3.connect(database)) as connection, connection:
        if not connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'experiments'").fetchone():
            return
        found = connection.execute("SELECT artifact_location FROM experiments WHERE name = ?", (_name(),)).fetchone()
        root = found[0] if found else target
        if root == target or not root.endswith(f"/{ARTIFACTS}"):
            return
        for table, column in places:
            connection.execute(
                f"UPDATE {table} SET {column} = ? || substr({column}, ?) WHERE substr({column}, 1, ?) = ?",
                (target, len(root) + 1, len(root), root),
            )
