import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from nbclient import NotebookClient
from tokenizers import decoders

from rloo_pipeline import audit
from rloo_pipeline.errors import UserError
from rloo_pipeline.manifest import read_manifest
from rloo_pipeline.shards import write_shards, write_shards_manifest, write_table
from tests.project import REPOSITORY, Project

NOTEBOOK = REPOSITORY / "notebooks" / "audit_rollouts.ipynb"
KEYS = ("iteration", "prompt_id", "sample_index")
STAGES = ("rollouts", "logprobs", "rewards", "advantages")
LAST = "0002"


@pytest.fixture(scope="module")
def finished_project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A project whose second iteration has its advantages."""
    project = Project.create(tmp_path_factory.mktemp("audit") / "project")
    for name in project.params()["sources"]:
        project.rloo("sources", name)
    project.rloo("prepare")
    for stage in (*STAGES, "update"):
        project.rloo(stage, "0001")
    for stage in STAGES:
        project.rloo(stage, LAST)
    return project


@pytest.fixture
def root(finished_project: Project, tmp_path: Path) -> Path:
    """The project's artifacts in a folder where a test may change them."""
    folder = tmp_path / "project"
    for name in ("artifacts", "provenance"):
        shutil.copytree(finished_project.root / name, folder / name)
    shutil.copyfile(finished_project.root / "params.yaml", folder / "params.yaml")
    return folder


def stored(root: Path, stage: str, iteration: str = LAST) -> pa.Table:
    """The rows of an artifact, read without the package."""
    files = sorted((root / "artifacts" / stage / iteration).glob("*.parquet"))
    return pa.concat_tables([pq.read_table(file, partitioning=None) for file in files])


def rewrite(root: Path, stage: str, table: pa.Table, iteration: str = LAST) -> None:
    """Put another table in an artifact's place, as the stage itself would have written it."""
    directory = root / "artifacts" / stage / iteration
    facts = read_manifest(directory)["facts"]
    shutil.rmtree(directory)
    write_shards_manifest(directory, write_shards(directory, 1, lambda _: table, table.schema), facts)


def shuffled(table: pa.Table, seed: int) -> pa.Table:
    return table.take(pa.array(np.random.default_rng(seed).permutation(table.num_rows)))


def replaced(table: pa.Table, name: str, values: list[object]) -> pa.Table:
    index = table.column_names.index(name)
    return table.set_column(index, table.schema.field(name), pa.array(values, table.schema.field(name).type))


def small(**columns: object) -> pa.Table:
    """A joined table made by hand: groups a and b of two completions, rows mixed."""
    keys = {
        "iteration": pa.array([1, 1, 1, 1], pa.int32()),
        "prompt_id": ["b", "a", "b", "a"],
        "sample_index": pa.array([1, 0, 0, 1], pa.int32()),
    }
    texts = {"prompt_text": ["B", "A", "B", "A"], "completion_text": ["b1", "a0", "b0", "a1"]}
    return pa.table({**keys, **texts, **columns})


def test_load_joins_by_key_whatever_the_row_order(root: Path) -> None:
    parts = {stage: stored(root, stage) for stage in STAGES}
    for seed, stage in enumerate(STAGES[1:]):
        rewrite(root, stage, shuffled(parts[stage], seed))

    expected: dict[tuple[object, ...], dict[str, object]] = {}
    for stage, table in parts.items():
        for row in table.to_pylist():
            if stage == "advantages":
                row["clipped_reward"] = row.pop("reward")
            expected.setdefault(tuple(row[key] for key in KEYS), {}).update(row)
    prompts = {row["prompt_id"]: row for row in pq.read_table(root / "artifacts/prompts/train.parquet").to_pylist()}
    for row in expected.values():
        row.update(prompts[row["prompt_id"]])

    assert audit.load(LAST, root).to_pylist() == [expected[key] for key in sorted(expected)]


def test_load_gives_every_completion_its_own_prompt(finished_project: Project) -> None:
    rows = audit.load(LAST, finished_project.root).to_pylist()
    assert rows
    assert all(row["prompt_text"] == f"Say {row['answer']}:" for row in rows)


@pytest.mark.parametrize(
    ("part", "gone", "kept"),
    [
        ("logprobs", "policy_logprobs", "kl"),
        ("rewards", "reward", "clipped_reward"),
        ("advantages", "advantage", "reward"),
    ],
)
def test_a_stage_that_has_not_run_is_left_out_and_said(
    root: Path, capsys: pytest.CaptureFixture[str], part: str, gone: str, kept: str
) -> None:
    shutil.rmtree(root / "artifacts" / part / LAST)
    table = audit.load(LAST, root)
    assert gone not in table.column_names
    assert kept in table.column_names
    assert f"{part} {LAST} left out: not there yet; run `dvc repro {part}@{LAST}`" in capsys.readouterr().err


def test_prompts_that_are_not_there_are_left_out_and_said(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "artifacts/prompts/train.parquet").unlink()
    table = audit.load(LAST, root)
    assert "answer" not in table.column_names
    assert {"prompt_text", "advantage"} <= set(table.column_names)
    assert "prompts left out" in capsys.readouterr().err


def test_prompts_changed_since_the_rollouts_are_left_out(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = root / "artifacts/prompts"
    prompts = pq.read_table(directory / "train.parquet")
    content = write_table(directory / "train.parquet", replaced(prompts, "answer", ["z"] * prompts.num_rows))
    write_shards_manifest(directory, [("train.parquet", prompts.num_rows, content)], {})
    columns = audit.load(LAST, root).column_names
    assert "answer" not in columns
    assert {"reward", "advantage"} <= set(columns)
    assert f"is not what rollouts {LAST} were made from" in capsys.readouterr().err


def test_advantages_of_other_rewards_are_left_out(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rewards = stored(root, "rewards")
    rewrite(root, "rewards", replaced(rewards, "reward", [7.0] * rewards.num_rows))
    table = audit.load(LAST, root)
    assert set(table["reward"].to_pylist()) == {7.0}
    assert "advantage" not in table.column_names
    assert f"advantages {LAST} left out: made from other rewards" in capsys.readouterr().err


def test_without_provenance_the_manifests_alone_tell_what_fits(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(root / "provenance")
    assert "advantage" in audit.load(LAST, root).column_names
    rollouts = stored(root, "rollouts")
    rewrite(root, "rollouts", replaced(rollouts, "completion_text", ["other"] * rollouts.num_rows))
    assert not {"policy_logprobs", "reward", "advantage"} & set(audit.load(LAST, root).column_names)
    assert capsys.readouterr().err.count("made from other rollouts than those in place") == 3


def test_a_file_that_was_altered_is_refused(root: Path) -> None:
    path = next((root / "artifacts/rewards" / LAST).glob("*.parquet"))
    table = pq.read_table(path, partitioning=None)
    write_table(path, replaced(table, "reward", [9.0] * table.num_rows))
    with pytest.raises(UserError, match=f"rewards/{LAST}/.*its bytes are not those that were written"):
        audit.load(LAST, root)


def test_an_iteration_without_rollouts_is_refused(finished_project: Project) -> None:
    with pytest.raises(UserError, match=r"rollouts 0009: .*there are rollouts of 0001, 0002; run"):
        audit.load("0009", finished_project.root)
    with pytest.raises(UserError, match="four digits"):
        audit.load("9", finished_project.root)


def test_iterations_are_those_with_complete_rollouts(root: Path) -> None:
    assert audit.iterations(root) == ["0001", "0002"]
    (root / "artifacts/rollouts/0002/manifest.json").unlink()
    assert audit.iterations(root) == ["0001"]
    assert audit.iterations(root / "nowhere") == []


def test_groups_hold_lists_in_the_order_of_sample_index() -> None:
    table = small(
        reward=pa.array([4.0, 1.0, 5.0, None], pa.float32()),
        clipped_reward=pa.array([3.0, 1.0, 3.0, None], pa.float64()),
        kl=[0.1, 0.2, 0.3, 0.4],
        baseline=[3.0, None, 3.0, None],
        advantage=[-0.5, 0.0, 0.5, 0.0],
    )
    one, two = audit.groups(table).to_pylist()
    assert one == {
        "iteration": 1, "prompt_id": "a", "prompt_text": "A", "completions": 2, "reward_mean": 1.0,
        "rewards": [1.0, None], "kl": [0.2, 0.4], "baselines": [None, None], "advantages": [0.0, 0.0],
        "has_signal": False,
    }  # fmt: skip
    assert two["rewards"] == [5.0, 4.0]
    assert two["reward_mean"] == 4.5
    assert two["kl"] == [0.3, 0.1]
    assert two["advantages"] == [0.5, -0.5]
    assert not two["has_signal"], "clipping made the rewards equal"
    assert audit.groups(table, limit=1).to_pylist() == [one]
    raw = audit.groups(table.drop_columns("clipped_reward"))
    assert raw["has_signal"].to_pylist() == [False, True]


def test_groups_of_rollouts_alone() -> None:
    assert audit.groups(small()).to_pylist() == [
        {"iteration": 1, "prompt_id": name, "prompt_text": name.upper(), "completions": 2} for name in "ab"
    ]


def test_group_shows_the_completions_side_by_side(finished_project: Project) -> None:
    root = finished_project.root
    rewards = {tuple(row[key] for key in KEYS): row for row in stored(root, "rewards").to_pylist()}
    rollouts = stored(root, "rollouts").to_pylist()
    prompt_id = rollouts[-1]["prompt_id"]
    found = audit.group(audit.load(LAST, root), prompt_id).to_pylist()
    assert [row["sample_index"] for row in found] == [0, 1, 2, 3]
    for row in found:
        source = next(r for r in rollouts if (r["prompt_id"], r["sample_index"]) == (prompt_id, row["sample_index"]))
        assert row["completion_text"] == source["completion_text"]
        assert row["tokens"] == len(source["completion_token_ids"])
        assert row["reward/letters"] == rewards[2, prompt_id, row["sample_index"]]["reward/letters"]
    with pytest.raises(UserError, match="prompt_id nobody: not in this iteration"):
        audit.group(audit.load(LAST, root), "nobody")


def test_tokens_stand_beside_their_log_probs(finished_project: Project) -> None:
    root = finished_project.root
    table = audit.load(LAST, root)
    for rollout, scores in zip(stored(root, "rollouts").to_pylist(), stored(root, "logprobs").to_pylist(), strict=True):
        seen = audit.tokens(table, rollout["prompt_id"], rollout["sample_index"])
        assert seen["token_id"].to_pylist() == rollout["completion_token_ids"]
        assert seen["sampler_logprob"].to_pylist() == rollout["sampler_logprobs"]
        assert seen["policy_logprob"].to_pylist() == scores["policy_logprobs"]
        assert seen["reference_logprob"].to_pylist() == scores["reference_logprobs"]
        written = [token for token in seen["token"].to_pylist() if not token.startswith("<|im_")]
        assert decoders.ByteLevel().decode(written) == rollout["completion_text"]


def test_tokens_of_a_chosen_tokenizer_and_without_reference(root: Path) -> None:
    table = audit.load(LAST, root)
    table = replaced(table, "reference_logprobs", [None] * table.num_rows)
    prompt_id = table["prompt_id"][0].as_py()
    shutil.move(root / "artifacts/policy/0000/model", root / "elsewhere")
    seen = audit.tokens(table, prompt_id, 0, root / "elsewhere")
    assert seen["reference_logprob"].null_count == seen.num_rows > 0
    with pytest.raises(UserError, match=r"artifacts/policy/0000/model/manifest\.json"):
        audit.tokens(table, prompt_id, 0)
    with pytest.raises(UserError, match="no tokenizer"):
        audit.tokens(table, prompt_id, 0, root / "nowhere")
    with pytest.raises(UserError, match="no sample_index 4; it has 0, 1, 2, 3"):
        audit.tokens(table, prompt_id, 4)


def test_import_is_light() -> None:
    code = "import sys, rloo_pipeline.audit; print(sorted({'torch', 'pandas', 'transformers'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=100)
    assert done.stdout.strip() == "[]"


def executed(folder: Path) -> tuple[str, str]:
    """The notebook's plain-text output and its HTML, run with `folder` as its working directory."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    folder.mkdir(exist_ok=True)
    NotebookClient(notebook, timeout=200, resources={"metadata": {"path": str(folder)}}).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    plain = [output.text if output.output_type == "stream" else output.data["text/plain"] for output in outputs]
    return "\n".join(plain), "\n".join(o.data.get("text/html", "") for o in outputs if o.output_type != "stream")


def test_notebook_shows_what_the_files_hold(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RLOO_ITERATION", raising=False)
    text, _ = executed(root / "notebooks")
    rollouts, rewards, advantages = (stored(root, stage) for stage in ("rollouts", "rewards", "advantages"))
    reward_N = rewards["reward"].to_numpy().astype(np.float64)
    kl_N = advantages["kl"].to_numpy()
    assert np.abs(kl_N).max() > 1e-4, "the policy has moved, so that the KL is worth showing"
    assert f"iteration {LAST} of 0001, {LAST}: {rollouts.num_rows} completions" in text
    assert f"completion tokens: {sum(map(len, rollouts['completion_token_ids'].to_pylist()))}\n" in text
    assert f"mean reward: {reward_N.mean():.6f}\n" in text
    assert f"mean KL, nats: {kl_N.mean():.6f}\n" in text
    assert f"trained on: {sum(advantages['trained'].to_pylist())}\n" in text

    ids = np.array(rewards["prompt_id"].to_pylist())
    order = np.lexsort((advantages["sample_index"].to_numpy(), np.array(advantages["prompt_id"].to_pylist())))
    keys = np.array(advantages["prompt_id"].to_pylist())[order]
    without_signal = 0
    for prompt_id in np.unique(ids):
        group_K = reward_N[ids == prompt_id]
        without_signal += len(set(group_K)) == 1
        line = next(line for line in text.splitlines() if prompt_id in line and "'Say " in line)
        assert f"{group_K.mean():.6f}" in line
        for column in ("kl", "baseline", "advantage"):
            values = advantages[column].to_numpy()[order][keys == prompt_id]
            assert str([round(float(value), 4) for value in values]) in line
    assert f"groups without signal: {without_signal}\n" in text
    assert f"the advantages of each of {len(np.unique(ids))} groups sum to 0" in text
    assert repr(rollouts["completion_text"].to_pylist()[int(reward_N.argmax())]) in text


def test_notebook_of_rollouts_alone_escapes_what_the_model_wrote(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rollouts = stored(root, "rollouts", "0001")
    texts = ["<script>alert(1)</script>\x1b[31m"] * rollouts.num_rows
    rewrite(root, "rollouts", replaced(rollouts, "completion_text", texts), "0001")
    monkeypatch.setenv("RLOO_ITERATION", "0001")
    text, html = executed(root)
    assert "iteration 0001 of 0001, 0002" in text
    assert "advantages 0001 left out: made from other rollouts" in text
    assert "\x1b" not in text + html
    assert "<script>alert" not in html
    assert "&lt;script&gt;alert" in html


def test_notebook_is_stored_without_outputs() -> None:
    cells = [cell for cell in nbformat.read(NOTEBOOK, as_version=4).cells if cell.cell_type == "code"]
    assert cells
    assert all(cell.outputs == [] and cell.execution_count is None for cell in cells)
