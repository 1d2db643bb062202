"""Checkpoints as logged models, and the best of them in the registry."""

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from rloo_pipeline.layout import Layout
from rloo_pipeline.tracking.book import project_id
from rloo_pipeline.tracking.files import Checkpoint
from rloo_pipeline.tracking.store import Store

if TYPE_CHECKING:
    from mlflow.entities import LoggedModel, Run

ALIAS = "best"
COPIED = "rloo.copied"
PROJECT = "rloo.project"  # the tag: the project's id


def logged_models(store: Store, run_id: str) -> dict[tuple[str, str], "LoggedModel"]:
    """The run's logged models by name and fingerprint."""
    found: dict[tuple[str, str], LoggedModel] = {}
    token = None
    while True:
        page = store.client.search_logged_models(
            [store.experiment_id], filter_string=f"source_run_id = '{run_id}'", page_token=token
        )
        found |= {(model.name, model.params.get("fingerprint", "")): model for model in page}
        token = page.token
        if not token:
            return found


def log_models(
    store: Store, run: "Run", checkpoints: Iterable[Checkpoint], hashes: Mapping[str, str]
) -> dict[str, "LoggedModel"]:
    """Every checkpoint as a logged model that refers to its files; by iteration.

    hashes: DVC's hashes by path; a checkpoint of a stage that is just ending has none yet.
    """
    import mlflow
    from mlflow.entities import LoggedModelOutput

    run_id = run.info.run_id
    known, models = logged_models(store, run_id), {}
    for checkpoint in checkpoints:
        name = f"policy-{checkpoint.iteration}"
        model = known.get((name, checkpoint.fingerprint))
        if model is None:
            facts = {"iteration": checkpoint.iteration, "path": checkpoint.path, "fingerprint": checkpoint.fingerprint}
            model = mlflow.create_external_model(
                name, source_run_id=run_id, params=facts, model_type="policy", experiment_id=store.experiment_id
            )
        md5 = hashes.get(checkpoint.path)
        if md5 is not None and model.tags.get("dvc.md5") != md5:
            store.client.set_logged_model_tags(model.model_id, {"dvc.md5": md5})
        models[checkpoint.iteration] = model
    shown = {output.model_id for output in (run.outputs.model_outputs if run.outputs else ())}
    new = [(model, iteration) for iteration, model in models.items() if model.model_id not in shown]
    if new:
        outputs = [LoggedModelOutput(model.model_id, step=int(iteration)) for model, iteration in new]
        store.client.log_outputs(run_id, outputs)
    return models


def copy_models(
    store: Store, layout: Layout, checkpoints: Iterable[Checkpoint], models: Mapping[str, "LoggedModel"]
) -> int:
    """Upload the files of every checkpoint that is here and not yet copied; returns how many were."""
    copied = 0
    for checkpoint in checkpoints:
        model, directory = models[checkpoint.iteration], layout.root / checkpoint.path
        if directory.is_dir() and model.tags.get(COPIED) != "true":
            store.client.log_model_artifacts(model.model_id, str(directory))
            store.client.set_logged_model_tags(model.model_id, {COPIED: "true"})
            copied += 1
    return copied


def registered_name(store: Store, layout: Layout) -> str:
    """The project's name in the registry, registered if it is not yet: that of its folder, unless another has it."""
    client, project = store.client, project_id(layout)
    mine = client.search_registered_models(f"tags.`{PROJECT}` = '{project}'")
    if mine:
        return str(mine[0].name)  # also after the folder was renamed
    name = "rloo-" + re.sub(r"[^\w.-]+", "-", layout.root.resolve().name)
    if client.search_registered_models(f"name = '{name}'"):
        name = f"{name}-{project[:8]}"
    description = "Policies of one project; best: by held-out reward."
    return str(client.create_registered_model(name, {PROJECT: project}, description).name)


def register_best(store: Store, layout: Layout, model: "LoggedModel") -> None:
    """Point the alias `best` to the model, registered anew if it is not yet."""
    from mlflow.exceptions import MlflowException

    client, name = store.client, registered_name(store, layout)
    source = f"models:/{model.model_id}"
    versions = [item for item in client.search_model_versions(f"name = '{name}'") if item.source == source]
    version = (
        versions[0]
        if versions
        else client.create_model_version(
            name,
            source,
            run_id=model.source_run_id,
            model_id=model.model_id,
            tags={"fingerprint": model.params["fingerprint"]},
        )
    )
    try:
        aliased = client.get_model_version_by_alias(name, ALIAS).version
    except MlflowException:
        aliased = None
    if aliased != version.version:
        client.set_registered_model_alias(name, ALIAS, version.version)
