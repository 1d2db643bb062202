"""Nothing is trained on that other weights sampled or that was scored from something else than what is on disk."""

import gc
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from rloo_pipeline.engines.transformers import TransformersEngine
from rloo_pipeline.errors import UserError
from rloo_pipeline.manifest import read_manifest, write_model_manifest
from rloo_pipeline.policy import trainer_state
from rloo_pipeline.shards import read_shards, write_shards, write_shards_manifest
from rloo_pipeline.stages import sampling
from tests.conftest import CommandLine
from tests.project import Project
from tests.tiny import make_model, make_policy


@pytest.fixture
def project(finished_project: Project, tmp_path: Path) -> Project:
    """The finished project without DVC's cache and git, to be written to."""
    root = tmp_path / "project"
    shutil.copytree(finished_project.root, root, ignore=shutil.ignore_patterns(".git", ".dvc"))
    return Project(root)


def rewrite(directory: Path, change: Callable[[pa.Table], pa.Table], **facts: Any) -> None:
    """Change an artifact's rows and facts, with shards and manifest as consistent as if its stage had written them."""
    manifest, table = read_manifest(directory), read_shards(directory)
    shutil.rmtree(directory)
    changed = change(table)
    entries = write_shards(directory, 1, lambda _: changed, changed.schema)
    write_shards_manifest(directory, entries, {**manifest["facts"], **facts})


def set_column(name: str, value: Any, rows: tuple[int, ...] | None = None) -> Callable[[pa.Table], pa.Table]:
    """Give a column one value, in these rows or in all."""

    def change(table: pa.Table) -> pa.Table:
        values = table[name].to_pylist()
        for row in range(len(values)) if rows is None else rows:
            values[row] = value
        place = table.schema.get_field_index(name)
        return table.set_column(place, table.schema.field(name), pa.array(values, table.schema.field(name).type))

    return change


def policy_of(project: Project, iteration: str) -> str:
    return str(project.json(f"artifacts/policy/{iteration}/model/manifest.json")["fingerprint"])


def files(project: Project, *folders: str) -> dict[str, bytes]:
    return {
        path.relative_to(project.root).as_posix(): path.read_bytes()
        for folder in folders
        for path in sorted((project.root / folder).rglob("*"))
        if path.is_file()
    }


def relabel(project: Project, rloo: CommandLine) -> None:
    """Rollouts of policy 0000 stand in iteration 0002 as if policy 0001 had sampled them, and are scored anew."""
    artifacts = project.root / "artifacts"
    shutil.rmtree(artifacts / "rollouts" / "0002")
    shutil.copytree(artifacts / "rollouts" / "0001", artifacts / "rollouts" / "0002")
    label = policy_of(project, "0001")

    def as_the_next(table: pa.Table) -> pa.Table:
        return set_column("policy_fingerprint", label)(set_column("iteration", 2)(table))

    dtype = project.params()["rollouts"].get("dtype", "float32")
    rewrite(artifacts / "rollouts" / "0002", as_the_next, policy_fingerprint=label, dtype=dtype)
    for stage in ("logprobs", "rewards", "advantages"):
        done = rloo(project, stage, "0002")
        assert done.code == 0, done.stderr
        assert ("warning: rollouts 0002" in done.stderr) == (stage == "logprobs")


def test_stale_weights(project: Project, rloo: CommandLine) -> None:
    relabel(project, rloo)
    before = files(project, "artifacts", "metrics", "provenance")
    done = rloo(project, "update", "0002")
    assert done.code == 2
    sampled, logprobs = (read_shards(project.root / "artifacts" / name / "0002") for name in ("rollouts", "logprobs"))
    pairs = zip(sampled["sampler_logprobs"].to_pylist(), logprobs["policy_logprobs"].to_pylist(), strict=True)
    largest = [max(abs(a - b) for a, b in zip(left, right, strict=True)) for left, right in pairs]
    worst = largest.index(max(largest))
    key = f"prompt_id {sampled['prompt_id'][worst]}, sample_index {sampled['sample_index'][worst]}"
    above = sum(gap > 0.01 for gap in largest)
    assert f"by up to {max(largest):.3g}"[:-1] in done.stderr
    assert f"in {above} of 16 completions, most in {key}" in done.stderr
    assert "dvc repro rollouts@0002" in done.stderr
    assert files(project, "artifacts", "metrics", "provenance") == before


def test_stale_weights_in_bfloat16_are_told(project: Project, rloo: CommandLine) -> None:
    project.change("rollouts.dtype", "bfloat16")
    relabel(project, rloo)
    done = rloo(project, "update", "0002")
    assert done.code == 0, done.stderr
    assert "warning: rollouts 0002: the sampler's log-probs differ" in done.stderr
    assert "dvc repro rollouts@0002" in done.stderr
    assert project.json("metrics/update/0002.json")["sampler_gap/warning"] == 1


@pytest.mark.parametrize("stage", ["logprobs", "update"])
def test_a_row_of_other_weights_is_named(project: Project, rloo: CommandLine, stage: str) -> None:
    rollouts = project.root / "artifacts" / "rollouts" / "0001"
    other = "f" * 64
    rewrite(rollouts, set_column("policy_fingerprint", other, rows=(5, 7)))
    if stage == "update":
        renewed = read_manifest(rollouts)["fingerprint"]
        for name in ("logprobs", "rewards"):
            rewrite(project.root / "artifacts" / name / "0001", lambda table: table, rollouts_fingerprint=renewed)
        assert rloo(project, "advantages", "0001").code == 0
    done = rloo(project, stage, "0001")
    assert done.code == 2
    row = read_shards(rollouts).slice(5, 1).to_pylist()[0]
    assert f"2 of 16 completions, prompt_id {row['prompt_id']}, sample_index 1 the first" in done.stderr
    assert f"other weights (ffffffffffff) than policy 0000 ({policy_of(project, '0000')[:12]})" in done.stderr
    assert "dvc repro rollouts@0001" in done.stderr


@pytest.mark.parametrize("stage", ["logprobs", "update"])
def test_rollouts_of_other_weights_are_refused(project: Project, rloo: CommandLine, stage: str) -> None:
    policy = project.root / "artifacts" / "policy"
    shutil.rmtree(policy / "0000" / "model")
    shutil.copytree(policy / "0001" / "model", policy / "0000" / "model")
    done = rloo(project, stage, "0001")
    assert done.code == 2
    assert "rollouts 0001 were sampled from other weights" in done.stderr
    assert "dvc repro rollouts@0001" in done.stderr


@pytest.mark.parametrize("stage", ["advantages", "update"])
def test_a_trainer_state_of_other_weights_is_refused(project: Project, rloo: CommandLine, stage: str) -> None:
    """As a `dvc checkout` of a policy's model alone leaves it."""
    policy = project.root / "artifacts" / "policy"
    shutil.rmtree(policy / "0001" / "trainer_state")
    shutil.copytree(policy / "0002" / "trainer_state", policy / "0001" / "trainer_state")
    before = files(project, "artifacts", "metrics", "provenance")
    done = rloo(project, stage, "0002")
    assert done.code == 2
    other, own = (policy_of(project, iteration)[:12] for iteration in ("0002", "0001"))
    told = f"policy/0001/trainer_state: written with other weights ({other}) than those of its policy ({own})"
    assert told in done.stderr
    assert "together with `dvc checkout`" in done.stderr
    assert files(project, "artifacts", "metrics", "provenance") == before


def test_an_evaluation_of_another_policy_is_no_opponent(project: Project, rloo: CommandLine) -> None:
    evaluation = project.root / "artifacts" / "evaluation"
    shutil.rmtree(evaluation / "0000")
    shutil.copytree(evaluation / "0001", evaluation / "0000")
    before = files(project, "artifacts", "metrics", "provenance")
    done = rloo(project, "evaluate", "0002")
    assert done.code == 2
    other, own = (policy_of(project, iteration)[:12] for iteration in ("0001", "0000"))
    assert f"artifacts/evaluation/0000: of other weights ({other}) than policy 0000 ({own})" in done.stderr
    assert "dvc repro evaluate_initial" in done.stderr
    assert files(project, "artifacts", "metrics", "provenance") == before


def test_without_the_initial_policy_its_evaluation_is_taken_as_it_is(project: Project, rloo: CommandLine) -> None:
    project.change("iterations.0002.reference", "0001")
    shutil.rmtree(project.root / "artifacts" / "policy" / "0000")
    done = rloo(project, "evaluate", "0002")
    assert done.code == 0, done.stderr
    assert "policy 0000 is not here, so it is not checked that evaluation 0000 is of it" in done.stderr


REWORDED = {"rewards": ("reward", 0.25, "rewards"), "logprobs": ("reference_logprobs", None, "log-probs")}


@pytest.mark.parametrize("scores", REWORDED)
def test_advantages_of_scores_no_longer_on_disk_are_refused(project: Project, rloo: CommandLine, scores: str) -> None:
    column, value, name = REWORDED[scores]
    rewrite(project.root / "artifacts" / scores / "0001", set_column(column, value, rows=(3,)))
    done = rloo(project, "update", "0001")
    assert done.code == 2
    assert f"advantages 0001 were made from other {name}" in done.stderr
    assert "dvc repro advantages@0001" in done.stderr


@pytest.mark.parametrize(("stage", "scores"), [("advantages", "logprobs"), ("advantages", "rewards"), ("update", None)])
def test_scores_of_other_rollouts_are_refused(
    project: Project, rloo: CommandLine, stage: str, scores: str | None
) -> None:
    changed = scores or "rollouts"
    rewrite(project.root / "artifacts" / changed / "0001", lambda table: table, **{
        "rollouts_fingerprint" if scores else "temperature": "another"
    })  # fmt: skip
    done = rloo(project, stage, "0001")
    assert done.code == 2
    assert f"{scores or 'advantages'} 0001 were made from other rollouts" in done.stderr
    assert f"dvc repro {scores or 'advantages'}@0001" in done.stderr


def test_a_component_of_no_weight_leaves_the_advantages_valid(project: Project, rloo: CommandLine) -> None:
    before = files(project, "artifacts/advantages/0001", "artifacts/policy/0001")
    rewards = project.params()["rewards"]
    project.change("rewards", [*rewards, {"name": "watched", "function": "reward.py:score", "weight": 0.0}])
    for stage in ("rewards", "advantages", "update"):
        done = rloo(project, stage, "0001")
        assert done.code == 0, done.stderr
        assert files(project, "artifacts/advantages/0001", "artifacts/policy/0001") == before


def test_update_without_rewards_says_what_it_did_not_check(project: Project, rloo: CommandLine) -> None:
    shutil.rmtree(project.root / "artifacts" / "rewards" / "0001")
    done = rloo(project, "update", "0001")
    assert done.code == 0
    assert "rewards 0001 are not here, so it is not checked" in done.stderr


def other_weights(model: Path, how: str) -> None:
    """Put other weights into a model's directory: by rename, or into the very file."""
    target = model / "model.safetensors"
    make_model(seed=9).save_pretrained(model / "new")
    if how == "renamed":
        (model / "new" / "model.safetensors").replace(target)
    else:
        content = (model / "new" / "model.safetensors").read_bytes()
        assert len(content) == target.stat().st_size
        target.chmod(0o600)
        with target.open("r+b") as file:
            file.write(content)
    shutil.rmtree(model / "new")


def swapped_at(monkeypatch: pytest.MonkeyPatch, moment: str, model: Path, how: str) -> None:
    """Swap the weights once: before the engine reads them, or when it has sampled its first shard."""
    done: list[bool] = []

    def swap() -> None:
        if not done:
            done.append(True)
            other_weights(model, how)

    real_open, real_generate = sampling.open_engine, TransformersEngine.generate

    def open_engine(*arguments: Any, **settings: Any) -> Any:
        if moment == "before loading":
            swap()
        return real_open(*arguments, **settings)

    def generate(*arguments: Any) -> Any:
        samples = real_generate(*arguments)
        if moment == "while sampling":
            swap()
        return samples

    monkeypatch.setattr(sampling, "open_engine", open_engine)
    monkeypatch.setattr(TransformersEngine, "generate", generate)


@pytest.mark.parametrize("how", ["renamed", "in place"])
@pytest.mark.parametrize("moment", ["before loading", "while sampling"])
def test_version_stamp(
    project: Project,
    finished_project: Project,
    rloo: CommandLine,
    monkeypatch: pytest.MonkeyPatch,
    moment: str,
    how: str,
) -> None:
    """The stamp is that of the weights that the engine loaded: if they are swapped on the way, nothing is stamped."""
    shutil.rmtree(project.root / "artifacts" / "rollouts" / "0001")
    model = project.root / "artifacts" / "policy" / "0000" / "model"
    with monkeypatch.context() as patch:
        swapped_at(patch, moment, model, how)
        done = rloo(project, "rollouts", "0001")
    assert done.code == 2
    assert "artifacts/policy/0000/model: its files changed while they were in use" in done.stderr
    assert not (project.root / "artifacts" / "rollouts" / "0001").exists()
    assert list((project.root / ".rloo" / "work" / "rollouts").rglob("shard-*.parquet")) == []
    shutil.copyfile(finished_project.root / model.relative_to(project.root) / "model.safetensors", model / "copy")
    (model / "copy").replace(model / "model.safetensors")
    assert rloo(project, "rollouts", "0001").code == 0
    assert files(project, "artifacts/rollouts") == files(finished_project, "artifacts/rollouts")


def test_touched_but_equal_files_are_no_change(
    project: Project, rloo: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a second link to the file is made or dropped in DVC's cache."""
    model = project.root / "artifacts" / "policy" / "0000" / "model"
    real_open = sampling.open_engine

    def open_engine(*arguments: Any, **settings: Any) -> Any:
        (project.root / "link").hardlink_to(model / "model.safetensors")
        return real_open(*arguments, **settings)

    monkeypatch.setattr(sampling, "open_engine", open_engine)
    assert rloo(project, "rollouts", "0001").code == 0


def test_stale_cache(project: Project, finished_project: Project, rloo: CommandLine) -> None:
    """Two policies one after the other in this process sample as in processes of their own, and leave no engine."""
    gc.collect()
    before = sum(isinstance(item, TransformersEngine) for item in gc.get_objects())
    for iteration in ("0001", "0002"):
        shutil.rmtree(project.root / "artifacts" / "rollouts" / iteration)
        assert rloo(project, "rollouts", iteration).code == 0
        gc.collect()
        assert sum(isinstance(item, TransformersEngine) for item in gc.get_objects()) == before
    sampled = files(project, "artifacts/rollouts")
    assert sampled == files(finished_project, "artifacts/rollouts")


def test_unstable_bytes(finished_project: Project) -> None:
    """What equality is claimed under stands in the provenance: device, versions, engine, threads and batch shapes."""
    told = {
        stage: finished_project.json(f"provenance/{stage}/0001.json")
        for stage in ("rollouts", "logprobs", "rewards", "advantages", "update", "evaluate")
    }
    for provenance in told.values():
        assert provenance["device"]
        assert {"python", "torch", "transformers", "numpy", "pyarrow"} <= set(provenance["versions"])
        assert provenance["seed"] == 3
    for stage in ("rollouts", "evaluate"):
        engine = told[stage]["engine"]
        shape = {"engine": "transformers", "dtype": "float32", "threads": 1, "batch_size": 64, "temperature": 1.0}
        assert shape.items() <= engine.items()
        assert {"engine_version", "max_model_len", "max_tokens", "eos_token_ids", "sampler"} <= set(engine)
    shapes = {
        "logprobs": {"logprobs_batch_tokens": 8192},
        "update": {"update_microbatch_tokens": 4096, "gradient_checkpointing": False},
        "evaluate": {"logprobs_batch_tokens": 8192},
    }
    for stage, shape in shapes.items():
        execution = told[stage]["execution"]
        assert (shape | {"attention": "sdpa", "threads": 1}).items() <= execution.items()
        assert {"cpu_capability", "cuda"} & set(execution)
    assert not {"execution", "engine"} & set(told["advantages"])


def test_the_engines_settings_survive_an_edited_reward(project: Project, rloo: CommandLine) -> None:
    """The samples are kept, so the settings told are those that made them, whatever the engine would get now."""
    before = project.json("provenance/evaluate/0001.json")["engine"]
    project.change("execution.generation_batch_size", 3)
    with (project.root / "reward.py").open("a") as file:
        file.write("\n\nWEIGHT = 2\n")
    done = rloo(project, "evaluate", "0001")
    assert done.code == 0
    assert "generating" not in done.stderr
    assert project.json("provenance/evaluate/0001.json")["engine"] == before


def test_all_engines_of_a_resumed_stage_are_told(
    project: Project, rloo: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped after its first shard, it goes on in other batches: the same ids, log-probs that may round otherwise."""
    shutil.rmtree(project.root / "artifacts" / "rollouts" / "0001")
    real, calls = TransformersEngine.generate, []

    def generate(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 2:
            raise UserError("stopped")
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(TransformersEngine, "generate", generate)
        assert rloo(project, "rollouts", "0001").code == 2
    project.change("execution.generation_batch_size", 3)
    assert rloo(project, "rollouts", "0001").code == 0
    told = project.json("provenance/rollouts/0001.json")["engine"]
    assert [engine["batch_size"] for engine in told] == [64, 3]


EVIL = b"cos\nsystem\n(S'touch executed'\ntR."  # unpickling it makes the file `executed`


@pytest.mark.parametrize("name", ["pytorch_model.bin", "optimizer.pt", "model.pkl", "sub/code.py"])
@pytest.mark.parametrize("stage", ["rollouts", "logprobs", "update"])
def test_a_pickle_beside_the_weights_is_refused(project: Project, rloo: CommandLine, stage: str, name: str) -> None:
    planted = project.root / "artifacts" / "policy" / "0000" / "model" / name
    planted.parent.mkdir(exist_ok=True)
    planted.write_bytes(EVIL)
    done = rloo(project, stage, "0001")
    assert done.code == 2
    assert f"file:{name} changed after the manifest was written" in done.stderr
    assert not (project.root / "executed").exists()


@pytest.mark.parametrize("stage", ["rollouts", "logprobs", "update"])
def test_a_pickle_in_place_of_the_weights_is_refused(project: Project, rloo: CommandLine, stage: str) -> None:
    """Though the manifests agree with it, it is not read."""
    model = project.root / "artifacts" / "policy" / "0000" / "model"
    (model / "model.safetensors").unlink()
    (model / "pytorch_model.bin").write_bytes(EVIL)
    label = write_model_manifest(model, trust_remote_code=False)
    write_model_manifest(model.parent / "trainer_state", policy_fingerprint=label)
    rollouts = project.root / "artifacts" / "rollouts" / "0001"
    rewrite(rollouts, set_column("policy_fingerprint", label), policy_fingerprint=label)
    renewed = read_manifest(rollouts)["fingerprint"]
    for name in ("logprobs", "rewards"):
        rewrite(project.root / "artifacts" / name / "0001", lambda table: table, rollouts_fingerprint=renewed)
    assert rloo(project, "advantages", "0001").code == 0
    done = rloo(project, stage, "0001")
    assert done.code == 2
    assert "artifacts/policy/0000/model: no .safetensors file in it" in done.stderr
    assert not (project.root / "executed").exists()


def test_a_pickle_in_place_of_the_optimizers_state_is_refused(project: Project, rloo: CommandLine) -> None:
    state = project.root / "artifacts" / "policy" / "0001" / "trainer_state"
    (state / trainer_state.MOMENTS).unlink()
    (state / "optimizer.pt").write_bytes(EVIL)
    write_model_manifest(state, **read_manifest(state)["facts"])
    done = rloo(project, "update", "0002")
    assert done.code == 2
    assert f"trainer_state/{trainer_state.MOMENTS}: no such file, though 1 steps are done" in done.stderr
    assert not (project.root / "executed").exists()


def test_a_pickled_reward_model_is_refused(project: Project, rloo: CommandLine) -> None:
    judge = make_policy(project.root / "judge")
    (judge / "model.safetensors").unlink()
    (judge / "pytorch_model.bin").write_bytes(EVIL)
    project.change("rewards", [{"name": "judge", "model": "judge"}])
    project.change("sources.judge", {"path": "judge", "used_by": "rewards"})
    done = rloo(project, "rewards", "0001")
    assert done.code == 2
    assert "reward judge: model judge: no .safetensors file" in done.stderr
    assert not (project.root / "executed").exists()


@pytest.mark.parametrize("trusted", [False, True])
def test_trust_in_remote_code_is_recorded_and_handed_on(project: Project, rloo: CommandLine, trusted: bool) -> None:
    project.change("policy.trust_remote_code", trusted)
    for command in (["prepare"], ["update", "0001"]):
        done = rloo(project, *command)
        assert done.code == 0, done.stderr
    for iteration in ("0000", "0001"):
        manifest = project.json(f"artifacts/policy/{iteration}/model/manifest.json")
        assert manifest["facts"] == {"trust_remote_code": trusted}


def test_code_beside_the_weights_is_not_run_unless_trusted(project: Project, rloo: CommandLine) -> None:
    """Not by the policy of a project, whose settings come from its manifest, and not by a reward model."""
    for place in ("tiny", "judge"):
        directory = project.root / place
        if place == "judge":
            make_policy(directory)
        (directory / "own.py").write_text("from pathlib import Path\nPath('executed').touch()\n")
        config = json.loads((directory / "config.json").read_text())
        config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}}
        (directory / "config.json").write_text(json.dumps(config))
    assert rloo(project, "prepare").code == 2
    project.change("rewards", [{"name": "judge", "model": "judge"}])
    project.change("sources.judge", {"path": "judge", "used_by": "rewards"})
    assert rloo(project, "rewards", "0001").code == 2
    assert not (project.root / "executed").exists()
