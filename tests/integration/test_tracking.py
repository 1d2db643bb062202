"""MLflow holds what a project's files say: once, completely, wherever the project stands."""

import hashlib
import json
import re
import shutil
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from mlflow.entities import Metric
from mlflow.tracking import MlflowClient
from ruamel.yaml import YAML

from rloo_pipeline.config import load_params
from rloo_pipeline.errors import UserError
from rloo_pipeline.layout import STAGES, Layout
from rloo_pipeline.stages import dispatch
from rloo_pipeline.tracking import Tracked, note_moment, run_id, run_url
from rloo_pipeline.tracking import track as track_layout
from rloo_pipeline.tracking.book import read_runs
from rloo_pipeline.tracking.find import Found, find
from rloo_pipeline.tracking.store import address
from tests.conftest import CommandLine
from tests.project import Project

PREFECT_RUN = "0f4a3c52-9d1b-4a77-8c39-5e2f6b7d8a90"


def track(project: Project, **options: bool) -> Tracked:
    return track_layout(Layout(project.root), load_params(project.root / "params.yaml"), **options)


def client(project: Project) -> MlflowClient:
    return MlflowClient(f"sqlite:///{project.root}/mlflow.db")


def runs(project: Project) -> list[Any]:
    experiment = client(project).get_experiment_by_name("rloo")
    return list(client(project).search_runs([experiment.experiment_id]))


def points(project: Project, run: str) -> list[Metric]:
    """Every point of a run as the store has it, duplicates and all."""
    keys = client(project).get_run(run).data.metrics
    return [point for key in keys for point in client(project).get_metric_history(run, key)]


def told_by_files(project: Project) -> dict[tuple[str, int], float]:
    """(stage/name, iteration) of every metric in metrics/."""
    found = {}
    for path in (project.root / "metrics").glob("*/*.json"):
        for name, value in json.loads(path.read_text()).items():
            found[f"{path.parent.name}/{name.replace('@', '_at_')}", int(path.stem)] = value
    return found


@pytest.fixture(autouse=True)
def _own_store(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME", "RLOO_PREFECT_FLOW_RUN_ID"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def tracked(finished_project: Project, tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A finished project in git after three calls of `track`. Not to be written to."""
    project = finished_project.copy(tmp_path_factory.mktemp("tracking") / "my project")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        for _ in range(3):
            track(project)
    return project


@pytest.fixture
def copy(tracked: Project, tmp_path: Path) -> Project:
    """A copy of the tracked project to work on."""
    return tracked.copy(tmp_path / "copy")


def test_every_metric_once_at_its_iteration(tracked: Project) -> None:
    (run,) = runs(tracked)
    found = points(tracked, run.info.run_id)
    assert max(Counter((point.key, point.step) for point in found).values()) == 1
    of_stages = {(point.key, point.step): point.value for point in found if point.key.split("/")[0] in STAGES}
    assert of_stages == told_by_files(tracked)
    assert ("evaluate/reward", 0) in of_stages
    seconds = {point.step: point.value for point in found if point.key == "timings/update/seconds"}
    assert seconds == {step: tracked.json(f"timings/update/000{step}.json")["seconds"] for step in (1, 2)}
    cpu = [point.value for point in found if point.key == "system/update/cpu_utilization_percentage_mean"]
    assert len(cpu) == 2
    assert all(0 <= value <= 100 for value in cpu)


def test_the_run_tells_params_name_and_end(tracked: Project) -> None:
    (run,) = runs(tracked)
    assert run.info.run_name.startswith("my project 20")
    assert run.info.status == "FINISHED"
    written = [path.stat().st_mtime_ns // 10**6 for path in tracked.root.glob("[mt][ei][tm]*/*/*.json")]
    assert (run.info.start_time, run.info.end_time) == (min(written), max(written))
    assert run.data.params["update.learning_rate"] == "0.001"
    assert run.data.params["rewards.letters.weight"] == "1.0"
    assert run_id(Layout(tracked.root)) == run.info.run_id
    assert run_url(Layout(tracked.root)) is None


def test_prompt_sets_are_inputs(tracked: Project) -> None:
    (run,) = runs(tracked)
    found = {item.dataset.name: (item.dataset.digest, item.tags[0].value) for item in run.inputs.dataset_inputs}
    for split in ("train", "eval"):
        metadata = pq.read_metadata(tracked.root / f"artifacts/prompts/{split}.parquet").metadata
        assert found[split] == (metadata[b"fingerprint"].decode()[:36], split)
    assert len(run.inputs.dataset_inputs) == 2


def test_checkpoints_are_models_with_the_metrics_of_their_iteration(tracked: Project) -> None:
    (run,) = runs(tracked)
    models = client(tracked).search_logged_models([run.info.experiment_id])
    assert sorted(model.name for model in models) == ["policy-0000", "policy-0001", "policy-0002"]
    assert {output.model_id for output in run.outputs.model_outputs} == {model.model_id for model in models}
    assert len(run.outputs.model_outputs) == 3
    outputs = {out["path"]: out["md5"] for stage in tracked.lock()["stages"].values() for out in stage["outs"]}
    for model in models:
        iteration = model.name.removeprefix("policy-")
        path = f"artifacts/policy/{iteration}/model"
        fingerprint = tracked.json(f"{path}/manifest.json")["fingerprint"]
        assert model.params == {"iteration": iteration, "path": path, "fingerprint": fingerprint}
        assert model.tags["dvc.md5"] == outputs[path]
        assert model.tags["mlflow.model.isExternal"].lower() == "true"
        assert model.source_run_id == run.info.run_id
        of_iteration = {key: value for (key, step), value in told_by_files(tracked).items() if step == int(iteration)}
        assert {metric.key: metric.value for metric in model.metrics} == of_iteration
        assert len(model.metrics) == len(of_iteration)


def test_the_best_by_held_out_reward_has_the_alias(tracked: Project) -> None:
    rewards = {i: tracked.json(f"metrics/evaluate/{i}.json")["reward"] for i in ("0000", "0001", "0002")}
    best = max(rewards, key=lambda iteration: rewards[iteration])
    version = client(tracked).get_model_version_by_alias("rloo-my-project", "best")
    assert version.tags["fingerprint"] == tracked.json(f"artifacts/policy/{best}/model/manifest.json")["fingerprint"]
    assert len(client(tracked).search_model_versions("name = 'rloo-my-project'")) == 1


def test_projects_of_one_name_have_models_of_their_own(
    copy: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = copy.copy(tmp_path / "elsewhere" / "copy")
    shutil.rmtree(other.root / ".rloo")
    rewards = {"0000": 0.9375, "0001": 0.5, "0002": 0.25}
    for iteration, reward in rewards.items():
        path = f"metrics/evaluate/{iteration}.json"
        (other.root / path).write_text(json.dumps({**other.json(path), "reward": reward}))
    uri = f"sqlite:///{tmp_path}/shared.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    mine, theirs = track(copy).run_id, track(other).run_id
    names = sorted(model.name for model in MlflowClient(uri).search_registered_models())
    assert names[0] == "rloo-copy"
    assert re.fullmatch(r"rloo-copy-[0-9a-f]{8}", names[1])
    moved = Project(other.root.rename(tmp_path / "moved"))
    for project in (copy, moved):
        track(project)
    assert sorted(model.name for model in MlflowClient(uri).search_registered_models()) == names
    bests = [MlflowClient(uri).get_model_version_by_alias(name, "best") for name in names]
    assert [best.run_id for best in bests] == [mine, theirs]
    initial = moved.json("artifacts/policy/0000/model/manifest.json")
    assert bests[1].tags["fingerprint"] == initial["fingerprint"]


def test_mlflow_twice(copy: Project) -> None:
    (run,) = runs(copy)
    before = points(copy, run.info.run_id)
    assert copy.repro() == []
    dispatch.run("evaluate", Layout(copy.root), load_params(copy.root / "params.yaml"), "0002")
    assert copy.repro() == []
    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(lambda _: track(copy), range(2)))
    assert {item.run_id for item in both} == {run.info.run_id}
    copy.change("execution.generation_batch_size", 7)
    track(copy)
    copy.change("execution.generation_batch_size", 9)
    for _ in range(2):
        track(copy)
    (run,) = runs(copy)
    assert run.data.params["execution.generation_batch_size"] == "64"
    assert run.data.tags["changed.execution.generation_batch_size"] == "64 -> 7 -> 9"
    assert sorted(map(str, points(copy, run.info.run_id))) == sorted(map(str, before))


def test_other_results_begin_a_new_run_and_the_old_ones_return_to_theirs(copy: Project) -> None:
    (first,) = runs(copy)
    path = copy.root / "metrics/evaluate/0002.json"
    old = path.read_text()
    path.write_text(json.dumps({**json.loads(old), "reward": 0.9375}))
    second = track(copy)
    assert second.new_run
    assert {run.info.run_id for run in runs(copy)} == {first.info.run_id, second.run_id}
    for run, reward in ((first.info.run_id, json.loads(old)["reward"]), (second.run_id, 0.9375)):
        assert [p.value for p in points(copy, run) if (p.key, p.step) == ("evaluate/reward", 2)] == [reward]
    path.write_text(old)
    third = track(copy)
    assert (third.run_id, third.new_points) == (first.info.run_id, 0)
    assert run_id(Layout(copy.root)) == first.info.run_id


def test_mlflow_store(copy: Project, tmp_path: Path) -> None:
    before = run_id(Layout(copy.root))
    moved = Project(copy.root.rename(tmp_path / "moved away"))
    # In a process of its own, as MLflow keeps the places of artifacts as long as the process lives.
    assert moved.rloo("track", "--copy-models").stdout.startswith(f"run {before}: 0 new points\n")
    (run,) = runs(moved)
    assert run.info.run_id == before
    artifacts = moved.root / "mlartifacts"
    assert Path(run.info.artifact_uri).is_relative_to(artifacts)
    assert Path(client(moved).get_experiment_by_name("rloo").artifact_location) == artifacts
    for model in client(moved).search_logged_models([run.info.experiment_id]):
        assert Path(model.artifact_location).is_relative_to(artifacts)
        stored = Path(model.artifact_location) / "model.safetensors"
        assert stored.read_bytes() == (moved.root / model.params["path"] / "model.safetensors").read_bytes()
        assert model.tags["rloo.copied"] == "true"
    version = client(moved).get_model_version_by_alias("rloo-my-project", "best")
    uri = client(moved).get_model_version_download_uri(version.name, version.version)
    assert (Path(uri) / "MLmodel").is_file()
    assert Path(uri).is_relative_to(artifacts)
    assert not copy.root.exists()


def test_mlflow_nan(copy: Project) -> None:
    (copy.root / "mlflow.db").unlink()
    metrics = copy.json("metrics/update/0002.json")
    (copy.root / "metrics/update/0002.json").write_text(json.dumps({**metrics, "loss": None}))
    provenance = copy.json("provenance/update/0002.json")
    (copy.root / "provenance/update/0002.json").write_text(json.dumps({**provenance, "not_finite": {"loss": "nan"}}))
    for _ in range(2):
        assert track(copy).not_finite == ("update/loss of 0002: nan",)
    (run,) = runs(copy)
    assert run.data.tags["rloo.not_finite"] == "update/loss of 0002: nan"
    found = {(p.key, p.step): p.value for p in points(copy, run.info.run_id) if p.key.split("/")[0] in STAGES}
    assert found == {key: value for key, value in told_by_files(copy).items() if key != ("update/loss", 2)}


def test_a_lost_database_is_made_again(copy: Project) -> None:
    lost = run_id(Layout(copy.root))
    (copy.root / "mlflow.db").unlink()
    done = track(copy)
    assert done.new_run
    assert done.run_id != lost
    (run,) = runs(copy)
    found = points(copy, run.info.run_id)
    assert {(p.key, p.step): p.value for p in found if p.key.split("/")[0] in STAGES} == told_by_files(copy)


def test_another_experiment_has_a_run_of_its_own(copy: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    (first,) = runs(copy)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "another")
    second = [track(copy), track(copy)]
    assert [item.new_run for item in second] == [True, False]
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME")
    assert track(copy).run_id == first.info.run_id
    for name, run in (("rloo", first.info.run_id), ("another", second[0].run_id)):
        experiment = client(copy).get_experiment_by_name(name).experiment_id
        models = client(copy).search_logged_models([experiment])
        assert sorted(model.name for model in models) == ["policy-0000", "policy-0001", "policy-0002"]
        assert {model.source_run_id for model in models} == {run}


def test_one_store_by_other_names_is_one_store(copy: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    (first,) = runs(copy)
    for uri in (f"sqlite:///{copy.root}/mlflow.db", f"sqlite:///{copy.root}/../copy/mlflow.db"):
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
        assert address(Layout(copy.root)) == "sqlite:///mlflow.db"
        assert track(copy) == Tracked(first.info.run_id, False, 0, ())
    for uri in ("http://me:s3cret@host:5000", "http://host:5000/", "http://host:5000//"):
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
        assert address(Layout(copy.root)) == "http://host:5000"


def test_lost_notes_are_read_from_the_store(copy: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = Layout(copy.root)
    (first,) = runs(copy)
    shutil.rmtree(layout.state)
    assert track(copy) == Tracked(first.info.run_id, False, 0, ())
    assert [model.name for model in client(copy).search_registered_models()] == ["rloo-my-project"]
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/shared.db")
    shared = track(copy)
    assert shared.new_run
    noted = [run.links for run in read_runs(layout) if run.run_id == shared.run_id]
    (layout.state / "runs.json").unlink()
    assert track(copy) == Tracked(shared.run_id, False, 0, ())
    assert [run.links for run in read_runs(layout)] == noted


def test_points_that_came_before_their_checkpoint_are_linked_to_it(copy: Project) -> None:
    """`rloo track` in the middle of an iteration, and again at its end."""
    (copy.root / "mlflow.db").unlink()
    late = {name: (copy.root / name).read_text() for name in ("metrics/update/0002.json", "metrics/evaluate/0002.json")}
    for name in late:
        (copy.root / name).unlink()
    track(copy)
    assert [run.info.status for run in runs(copy)] == ["RUNNING"]
    for name, text in late.items():
        (copy.root / name).write_text(text)
    track(copy)
    (run,) = runs(copy)
    assert run.info.status == "FINISHED"
    found = points(copy, run.info.run_id)
    assert max(Counter((point.key, point.step) for point in found).values()) == 1
    (model,) = client(copy).search_logged_models([run.info.experiment_id], filter_string="name = 'policy-0002'")
    of_iteration = {key: value for (key, step), value in told_by_files(copy).items() if step == 2}
    assert {metric.key: metric.value for metric in model.metrics} == of_iteration


def test_a_run_deleted_in_the_ui_is_not_written_to(copy: Project) -> None:
    (deleted,) = runs(copy)
    client(copy).delete_run(deleted.info.run_id)
    assert track(copy).run_id != deleted.info.run_id


def test_a_stage_tracks_at_its_end_and_outlives_a_server_that_is_down(
    copy: Project, rloo: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    (copy.root / "mlflow.db").unlink()
    copy.change("execution.tracking", True)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:s3cret@127.0.0.1:9")
    outcome = rloo(copy, "evaluate", "0002")
    assert outcome.code == 0
    (line,) = [line for line in outcome.stderr.splitlines() if line.startswith("mlflow: ")]
    down = "does not answer (Connection refused)"
    assert line == f"mlflow: http://127.0.0.1:9 took nothing ({down}); `rloo track` makes up for it"
    assert copy.json("timings/evaluate/0002.json")["system"]["process_memory_megabytes_max"] > 0
    outcome = rloo(copy, "track")
    assert outcome.code == 2
    assert outcome.stderr == f"error: mlflow at http://127.0.0.1:9: {down}; see MLFLOW_TRACKING_URI\n"
    assert "s3cret" not in line + outcome.stderr
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    assert rloo(copy, "evaluate", "0002").code == 0
    (run,) = runs(copy)
    found = points(copy, run.info.run_id)
    assert {(p.key, p.step): p.value for p in found if p.key.split("/")[0] in STAGES} == told_by_files(copy)


def test_a_database_that_is_none_is_told(copy: Project, rloo: CommandLine) -> None:
    (copy.root / "mlflow.db").write_text("no database, but longer than the header of one. " * 9)
    outcome = rloo(copy, "track")
    assert outcome.code == 2
    assert outcome.stderr == "error: mlflow at sqlite:///mlflow.db: file is not a database; see MLFLOW_TRACKING_URI\n"


def test_a_deleted_experiment_is_told(copy: Project, rloo: CommandLine) -> None:
    number = client(copy).get_experiment_by_name("rloo").experiment_id
    client(copy).delete_experiment(number)
    outcome = rloo(copy, "track")
    assert outcome.code == 2
    restore = f"`mlflow experiments restore --experiment-id {number}`"
    assert f"the experiment rloo was deleted: {restore}, or name another in MLFLOW_EXPERIMENT_NAME" in outcome.stderr


@pytest.mark.parametrize("text", ["{", "[]", '{"runs": [{}]}', '{"runs": [1]}'])
def test_broken_notes_are_told_with_the_remedy(copy: Project, rloo: CommandLine, text: str) -> None:
    (copy.root / ".rloo/runs.json").write_text(text)
    outcome = rloo(copy, "track")
    assert outcome.code == 2
    assert ".rloo/runs.json: not " in outcome.stderr
    assert outcome.stderr.endswith("remove it, then `rloo track`\n")


def test_light_stages_do_not_track(copy: Project, rloo: CommandLine) -> None:
    (copy.root / "mlflow.db").unlink()
    copy.change("execution.tracking", True)
    assert rloo(copy, "advantages", "0002").code == 0
    assert not (copy.root / "mlflow.db").exists()


def commit(project: Project) -> str:
    project.run("git", "add", ".")
    project.run("git", "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "-m", "state")
    return project.run("git", "rev-parse", "HEAD").stdout.strip()


def test_each_id_finds_the_other_three(copy: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = Layout(copy.root)
    (run,) = runs(copy)
    monkeypatch.setenv("RLOO_PREFECT_FLOW_RUN_ID", PREFECT_RUN)
    track(copy)
    revision = commit(copy)
    found = find(layout, "HEAD")
    assert found.dvc_lock is not None
    assert found == Found(revision, found.dvc_lock, PREFECT_RUN, run.info.run_id)
    file_hash = copy.run("sha256sum", "dvc.lock").stdout[:64]
    for name in (revision[:10], found.dvc_lock, found.dvc_lock[:8], file_hash, PREFECT_RUN, run.info.run_id):
        assert find(layout, name) == found
    with pytest.raises(UserError, match="no git revision"):
        find(layout, "deadbeefdeadbeef")
    with pytest.raises(UserError, match="no git revision"):
        find(layout, "dead")
    # Ids are in no file that DVC or git keeps.
    for path in ("dvc.lock", "dvc.yaml", "params.yaml"):
        assert run.info.run_id not in (copy.root / path).read_text()
    assert ".rloo" not in copy.run("git", "ls-files").stdout

    # A clone without .rloo asks the store.
    copy.run("git", "clone", "-q", str(copy.root), str(tmp_path / "clone"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{copy.root}/mlflow.db")
    short = [item[:8] for item in (revision, found.dvc_lock, file_hash, PREFECT_RUN, run.info.run_id)]
    for name in ("HEAD", revision, found.dvc_lock, file_hash, PREFECT_RUN, run.info.run_id, *short):
        assert find(Layout(tmp_path / "clone"), name) == found
    with pytest.raises(UserError, match="no git revision"):
        find(Layout(tmp_path / "clone"), "deadbeefdeadbeef")


def at_night(project: Project, stages: dict[str, Any], flow_run: str | None) -> str:
    """A flow run that ends with these stages in dvc.lock, the last of them tracked before DVC wrote it; a commit."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RLOO_PREFECT_FLOW_RUN_ID", flow_run or "")
        track(project, stage_ends=True)
        with (project.root / "dvc.lock").open("w") as file:
            YAML().dump({"schema": "2.0", "stages": stages}, file)
        note_moment(Layout(project.root))
    project.run("git", "add", ".")
    project.run("git", "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "--allow-empty", "-m", "night")
    return project.run("git", "rev-parse", "HEAD").stdout.strip()


def test_each_night_finds_its_own_commit_and_flow_run(copy: Project) -> None:
    layout = Layout(copy.root)
    for name in ("mlflow.db", ".rloo/runs.json"):
        (copy.root / name).unlink()
    second = {path: path.read_text() for path in (copy.root / "metrics").glob("*/0002.json")}
    for path in second:
        path.unlink()
    whole = copy.lock()["stages"]
    half = {name: stage for name, stage in whole.items() if not name.endswith("0002")}
    (copy.root / "dvc.lock").unlink()
    commit(copy)
    revisions = [at_night(copy, half, "11111111-night")]
    for path, text in second.items():
        path.write_text(text)
    revisions += [at_night(copy, whole, "22222222-night")]
    at_night(copy, whole, "33333333-night")
    track(copy)
    (run,) = runs(copy)
    contents = [json.dumps({"schema": "2.0", "stages": stages}, sort_keys=True) for stages in (half, whole)]
    hashes = [hashlib.sha256(text.encode()).hexdigest() for text in contents]
    for revision, lock, flow_run in zip(revisions, hashes, ("11111111-night", "22222222-night"), strict=True):
        expected = Found(revision, lock, flow_run, run.info.run_id)
        assert [find(layout, name) for name in (revision, lock, flow_run)] == [expected] * 3
    assert find(layout, "33333333-night") == Found(revisions[1], hashes[1], "33333333-night", run.info.run_id)
    assert find(layout, run.info.run_id) == find(layout, "22222222-night")


def test_nothing_is_noted_where_nothing_is_tracked(copy: Project) -> None:
    (copy.root / ".rloo/runs.json").unlink()
    note_moment(Layout(copy.root))
    assert not (copy.root / ".rloo/runs.json").exists()


def test_an_older_revision_finds_the_run_whose_metrics_it_names(copy: Project) -> None:
    """Two runs in one project: each revision's dvc.lock tells which one it belongs to."""
    (first,) = runs(copy)
    before = commit(copy)
    copy.change("evaluate.samples_per_prompt", 3)
    dispatch.run("evaluate", Layout(copy.root), load_params(copy.root / "params.yaml"), "0000")
    copy.run("dvc", "commit", "--force", "evaluate_initial")
    second = track(copy)
    after = commit(copy)
    assert second.new_run
    layout = Layout(copy.root)
    assert (find(layout, before).mlflow_run, find(layout, after).mlflow_run) == (first.info.run_id, second.run_id)
    assert find(layout, find(layout, before).dvc_lock or "").mlflow_run == first.info.run_id
    assert find(layout, first.info.run_id).git_revision == before
