"""One MLflow run made equal to the project's files: what it does not hold yet is logged, nothing twice."""

import json
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from rloo_pipeline.layout import REWARD_MODEL, Layout
from rloo_pipeline.tracking.book import Link, Run, project_id
from rloo_pipeline.tracking.files import Contents, Point
from rloo_pipeline.tracking.models import PROJECT, copy_models, log_models, register_best
from rloo_pipeline.tracking.store import DEFAULT, Store

if TYPE_CHECKING:
    from mlflow import entities

Held = dict[tuple[str, int], "entities.Metric"]
Opened = tuple[Run, "entities.Run", Held]
PER_BATCH = 1000  # metrics in one request
PARAMS_PER_BATCH = 100
LONGEST_TAG = 8000
ABSENT = "(absent)"
LINKS = "rloo.links"  # the tag: the moments of the run, the latest first
BEST_BY = "evaluate/reward"


def find_run(store: Store, layout: Layout, known: Iterable[Run], contents: Contents) -> Opened | None:
    """The latest of the project's runs in the store's experiment that holds no other results than the files."""
    from mlflow.exceptions import MlflowException

    place = (store.address, store.experiment_id)
    here = [run for run in known if (run.store, run.experiment_id) == place]
    for run in reversed(here or _runs_of_project(store, layout)):
        try:
            found = store.client.get_run(run.run_id)
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            continue
        held = _held(store, found, contents.points)
        if found.info.lifecycle_stage == "active" and _agree(held, contents.points):
            return run, found, held
    return None


def _runs_of_project(store: Store, layout: Layout) -> list[Run]:
    """The project's runs as the store knows them, the latest last: .rloo/runs.json was lost.

    In the project's own database every run is the project's, and gives it its id back if that was lost as well.
    """
    own = store.address == DEFAULT
    mine = "mlflow.source.name` = 'rloo'" if own else f"{PROJECT}` = '{project_id(layout)}'"
    found = store.client.search_runs([store.experiment_id], f"tags.`{mine}", order_by=["attributes.start_time ASC"])
    if own and found:
        project_id(layout, found[-1].data.tags.get(PROJECT))
    return [noted_run(store, run) for run in found]


def noted_run(store: Store, run: "entities.Run") -> Run:
    """What the tags of a run say of its moments."""
    links = [Link(*link) for link in reversed(json.loads(run.data.tags.get(LINKS, "[]")))]
    return Run(store.address, store.experiment_id, run.info.run_id, links)


def create_run(store: Store, layout: Layout, contents: Contents) -> Opened:
    """A new run, named after the project's folder and the time; it began with its earliest record."""
    tags = {"mlflow.source.name": "rloo", PROJECT: project_id(layout)}
    name = f"{layout.root.resolve().name} {time.strftime('%Y-%m-%d %H:%M:%S')}"
    began = min((point.timestamp for point in contents.points), default=None)
    found = store.client.create_run(store.experiment_id, start_time=began, run_name=name, tags=tags)
    return Run(store.address, store.experiment_id, found.info.run_id), found, {}


def _held(store: Store, run: "entities.Run", points: Iterable[Point]) -> Held:
    """The points that the run holds, of the keys that are in question."""
    keys = sorted({point.key for point in points} & run.data.metrics.keys())
    with ThreadPoolExecutor(8 if store.remote else 1) as pool:
        histories = pool.map(lambda key: store.client.get_metric_history(run.info.run_id, key), keys)
        return {(metric.key, metric.step): metric for history in histories for metric in history}


def _agree(held: Held, points: Iterable[Point]) -> bool:
    found = ((held.get((point.key, point.step)), point) for point in points if not point.measured)
    return all(metric is None or metric.value == point.value for metric, point in found)


def fill(
    store: Store, layout: Layout, found: Opened, contents: Contents, hashes: Mapping[str, str], *, copy: bool
) -> int:
    """Log what the run does not hold; returns how many points that were.

    hashes: DVC's hashes of the outputs, by path; copy: whether the checkpoints' files are uploaded.
    """
    run, stored, held = found
    models = log_models(store, stored, contents.checkpoints, hashes)
    new = _log_points(store, run, held, contents.points, models)
    _log_params(store, stored, contents.params)
    _log_inputs(store, stored, contents)
    _set_tags(
        store,
        stored,
        {**_link_tags(run), PROJECT: project_id(layout), "rloo.not_finite": "; ".join(contents.not_finite)},
    )
    if copy:
        copy_models(store, layout, contents.checkpoints, models)
    _register(store, layout, contents, models)
    _end(store, stored, contents)
    run.metrics |= contents.hashes
    return new


def _end(store: Store, run: "entities.Run", contents: Contents) -> None:
    """A run whose chain is evaluated to its end is finished, at the time of its last record; others go on."""
    if not contents.complete:
        if run.info.status != "RUNNING":
            store.client.update_run(run.info.run_id, status="RUNNING")
        return
    last = max(point.timestamp for point in contents.points)
    if run.info.status != "FINISHED" or (run.info.end_time or 0) < last:
        store.client.set_terminated(run.info.run_id, "FINISHED", end_time=last)


def _log_points(
    store: Store, run: Run, held: Held, points: Iterable[Point], models: Mapping[str, "entities.LoggedModel"]
) -> int:
    """Log the points that are new, and link those of a checkpoint to its model; returns how many are new."""
    from mlflow.entities import Metric

    linked = {(metric.key, metric.step) for model in models.values() for metric in model.metrics or ()}
    metrics, new = [], 0
    for point in points:
        before, model = held.get((point.key, point.step)), models.get(f"{point.step:04d}")
        of_policy = not point.measured and not point.key.startswith(f"{REWARD_MODEL}/")
        model_id = model.model_id if of_policy and model is not None else None
        if before is None or (model_id is not None and (point.key, point.step) not in linked):
            # One that is there and only linked is sent as it is there: the store keeps equal ones once.
            stamp = point.timestamp if before is None else before.timestamp
            metrics.append(Metric(point.key, point.value, stamp, point.step, model_id=model_id))
            new += before is None
    for start in range(0, len(metrics), PER_BATCH):
        store.client.log_batch(run.run_id, metrics=metrics[start : start + PER_BATCH], synchronous=True)
    return new


def _log_params(store: Store, run: "entities.Run", params: Mapping[str, str]) -> None:
    """Log new params; one that has another value by now is told in a tag, since MLflow's own cannot change."""
    from mlflow.entities import Param

    new = [Param(key, value) for key, value in params.items() if key not in run.data.params]
    for start in range(0, len(new), PARAMS_PER_BATCH):
        store.client.log_batch(run.info.run_id, params=new[start : start + PARAMS_PER_BATCH], synchronous=True)
    changes = {}
    for key, first in run.data.params.items():
        value, told = params.get(key, ABSENT), run.data.tags.get(f"changed.{key}", first)
        if told != value and not told.endswith(f" -> {value}"):
            changes[f"changed.{key}"] = f"{told} -> {value}"
    _set_tags(store, run, changes)


def _log_inputs(store: Store, run: "entities.Run", contents: Contents) -> None:
    """The prompt sets as datasets; MLflow's digests are short, so the whole fingerprint stands in the profile."""
    from mlflow.entities import Dataset, DatasetInput, InputTag

    held = {(item.dataset.name, item.dataset.digest) for item in (run.inputs.dataset_inputs if run.inputs else ())}
    new = []
    for item in contents.prompt_sets:
        digest = item.fingerprint[:36]
        if (item.split, digest) not in held:
            source, profile = json.dumps({"uri": item.path}), json.dumps({"fingerprint": item.fingerprint})
            dataset = Dataset(item.split, digest, "local", source, profile=profile)
            new.append(DatasetInput(dataset, [InputTag("mlflow.data.context", item.split)]))
    if new:
        store.client.log_inputs(run.info.run_id, new)


def _link_tags(run: Run) -> dict[str, str]:
    """The moments of the run, the latest first, as many as a tag holds."""
    links = [[link.git_revision, link.prefect_run, link.dvc_lock] for link in reversed(run.links)]
    while len(text := json.dumps(links)) > LONGEST_TAG:
        links.pop()
    revision = run.links[-1].git_revision if run.links else None
    return {LINKS: text, **({"mlflow.source.git.commit": revision} if revision else {})}


def _set_tags(store: Store, run: "entities.Run", tags: Mapping[str, str]) -> None:
    for key, value in tags.items():
        if run.data.tags.get(key, "") != value[:LONGEST_TAG]:
            store.client.set_tag(run.info.run_id, key, value[:LONGEST_TAG], synchronous=True)


def _register(store: Store, layout: Layout, contents: Contents, models: Mapping[str, "entities.LoggedModel"]) -> None:
    """The alias `best` to the checkpoint with the highest held-out reward, the earliest of equal ones."""
    rewards = {f"{point.step:04d}": point.value for point in contents.points if point.key == BEST_BY}
    evaluated = [iteration for iteration in models if iteration in rewards]
    if evaluated:
        best = max(evaluated, key=lambda iteration: rewards[iteration])
        register_best(store, layout, models[best])
