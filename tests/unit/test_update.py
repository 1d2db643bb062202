import json
import math

import numpy as np
import pyarrow as pa
import pytest
import torch
from tokenizers import Tokenizer, models

from rloo_pipeline.config import ExecutionConfig, IterationConfig, UpdateConfig
from rloo_pipeline.errors import UserError
from rloo_pipeline.fingerprint import of_model
from rloo_pipeline.guard import check_on_policy, sampler_gap
from rloo_pipeline.layout import Layout
from rloo_pipeline.manifest import read_manifest, write_model_manifest
from rloo_pipeline.policy import trainer_state
from rloo_pipeline.policy.load import load_model
from rloo_pipeline.policy.logprobs import batches, score
from rloo_pipeline.policy.step import Rows, Totals, accumulate, make_optimizer, take_step
from rloo_pipeline.schema import ADVANTAGES, ROLLOUTS
from rloo_pipeline.shards import write_shards, write_shards_manifest
from rloo_pipeline.stages.context import Context
from rloo_pipeline.stages.optimize import check_gap
from rloo_pipeline.stages.update import run, trained_rows
from tests.enumeration import one_thread
from tests.sampling import Counter
from tests.tiny import make_model, make_policy

CONFIG = UpdateConfig(learning_rate=1e-3)
TEMPERATURE = 0.7


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    with one_thread():
        yield


def make_rows(seed=0, lengths=((3, 4), (9, 1), (1, 6), (5, 3), (7, 8), (2, 2)), advantages=None):
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(2, 258, prompt) for prompt, _ in lengths]
    completions = [rng.integers(2, 258, completion) for _, completion in lengths]
    sampled = [np.zeros(len(ids), np.float32) for ids in completions]
    return Rows(prompts, completions, sampled, rng.normal(size=len(lengths)) if advantages is None else advantages)


def sequence_logprob(model, prompt, completion):
    """By torch's own distribution, one completion without padding, [] with gradient."""
    logits_TV = model(input_ids=torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1]
    distribution = torch.distributions.Categorical(logits=logits_TV / TEMPERATURE)
    return distribution.log_prob(torch.tensor(np.asarray(completion))).sum()


def mean_entropy(model, rows):
    """By torch's own distribution, over all tokens sampled, nats."""
    with torch.no_grad():
        entropies = [
            torch.distributions.Categorical(
                logits=model(input_ids=torch.tensor([[*p, *c]])).logits[0, len(p) - 1 : -1] / TEMPERATURE
            ).entropy()
            for p, c in zip(rows.prompts_N, rows.completions_N, strict=True)
        ]
    return torch.cat(entropies).mean().item()


def gradients(model):
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def assert_close(got, expected, tolerance):
    for name, gradient in expected.items():
        torch.testing.assert_close(got[name], gradient, rtol=0, atol=tolerance)


@pytest.fixture(scope="module")
def by_hand():
    """Gradient of -mean_i A_i log pi(y_i), a completion at a time, in float64."""
    model, rows = make_model().double(), make_rows()
    losses = [
        -advantage * sequence_logprob(model, prompt, completion)
        for prompt, completion, advantage in zip(rows.prompts_N, rows.completions_N, rows.advantages_N, strict=True)
    ]
    loss = torch.stack(losses).mean()
    loss.backward()
    return loss.item(), gradients(model)


@pytest.mark.parametrize("batch_tokens", [1, 15, 24, 1000])
def test_gradients_do_not_depend_on_the_microbatch_size(by_hand, batch_tokens):
    model = make_model().double()
    totals = accumulate(model, make_rows(), TEMPERATURE, CONFIG, batch_tokens)
    assert totals.loss == pytest.approx(by_hand[0], abs=1e-10)
    assert_close(gradients(model), by_hand[1], 1e-10)


def test_gradient_checkpointing_gives_the_same_gradients(by_hand):
    model = make_model().double().train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    accumulate(model, make_rows(), TEMPERATURE, CONFIG, 24)
    assert_close(gradients(model), by_hand[1], 1e-10)


def test_accumulate():
    """Sequence losses [1, 1, 1] in one microbatch and [5] in another: 2.0."""
    model = make_model().double()
    rows = make_rows(lengths=((2, 2), (2, 2), (2, 2), (6, 6)), advantages=np.zeros(4))
    with torch.no_grad():
        sums = [sequence_logprob(model, p, c).item() for p, c in zip(rows.prompts_N, rows.completions_N, strict=True)]
    rows = Rows(
        rows.prompts_N, rows.completions_N, rows.sampler_logprobs_N, np.array([1.0, 1.0, 1.0, 5.0]) / -np.array(sums)
    )
    assert [len(batch.rows_B) for batch in batches(rows.prompts_N, rows.completions_N, 12)] == [1, 3]
    assert accumulate(model, rows, TEMPERATURE, CONFIG, 12).loss == pytest.approx(2.0, abs=1e-10)


def test_totals_hold_every_rows_logprobs_and_the_entropy():
    model, rows = make_model(), make_rows()
    totals = accumulate(model, rows, TEMPERATURE, CONFIG, 20)
    expected = score(model, rows.prompts_N, rows.completions_N, TEMPERATURE, 1000, Counter())
    for got_T, expected_T in zip(totals.logprobs_N, expected, strict=True):
        np.testing.assert_allclose(got_T, expected_T, atol=1e-4)
    assert totals.entropy == pytest.approx(24 * mean_entropy(make_model().double(), rows), rel=1e-5)


def test_loss_zero():
    """An output layer of zeros: every token has log-prob -log V, so advantages 1 and -1 give loss 0, yet a step."""
    model = make_model(tie_word_embeddings=False)
    with torch.no_grad():
        model.lm_head.weight.zero_()
    rows = make_rows(lengths=((3, 4), (3, 4)), advantages=np.array([1.0, -1.0]))
    parameters = dict(model.named_parameters())
    totals = accumulate(model, rows, 1.0, CONFIG, 1000)
    assert totals.loss == 0
    metrics = take_step(make_optimizer(parameters, CONFIG), parameters, CONFIG, 0)
    assert metrics["grad_norm"] > 0.01
    assert model.lm_head.weight.abs().max().item() == pytest.approx(1e-3, rel=1e-3)


def one_step(model, parameters, optimizer, config, step):
    accumulate(model, make_rows(seed=step), TEMPERATURE, config, 24)
    metrics = take_step(optimizer, parameters, config, step)
    optimizer.zero_grad()
    return metrics["learning_rate"]


def test_resume_state(tmp_path):
    """Five steps, each from files into fresh objects and back, against torch's AdamW in one go."""
    config = UpdateConfig(learning_rate=1e-3, warmup_steps=10, weight_decay=0.1)
    make_model().save_pretrained(tmp_path / "0" / "model")
    trainer_state.write_initial_state(tmp_path / "0" / "state")
    rates = []
    for iteration in range(5):
        model = load_model(tmp_path / str(iteration) / "model", "float32")
        parameters = dict(model.named_parameters())
        optimizer = make_optimizer(parameters, config)
        step = trainer_state.restore(optimizer, parameters, tmp_path / str(iteration) / "state")
        assert step == iteration
        rates.append(one_step(model, parameters, optimizer, config, step))
        model.save_pretrained(tmp_path / str(iteration + 1) / "model")
        trainer_state.save(optimizer, parameters, tmp_path / str(iteration + 1) / "state", step + 1)
    assert rates == pytest.approx([1e-4, 2e-4, 3e-4, 4e-4, 5e-4], rel=1e-12)

    expected = make_model()
    named = dict(expected.named_parameters())
    norms = [parameter for name, parameter in named.items() if "norm" in name]
    matrices = [parameter for name, parameter in named.items() if "norm" not in name]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8)
    for step in range(5):
        accumulate(expected, make_rows(seed=step), TEMPERATURE, config, 24)
        torch.nn.utils.clip_grad_norm_(expected.parameters(), 1.0)
        for group in adamw.param_groups:
            group["lr"] = 1e-3 * (step + 1) / 10
        adamw.step()
        adamw.zero_grad()
    for name, parameter in load_model(tmp_path / "5" / "model", "float32").named_parameters():
        assert torch.equal(parameter, named[name]), name


def vector_with_gradient(values):
    parameter = torch.nn.Parameter(torch.zeros(len(values)))
    parameter.grad = torch.tensor(values)
    return {"vector": parameter}


@pytest.mark.parametrize(("limit", "expected"), [(1.0, [0.6, 0.8]), (None, [3.0, 4.0]), (10.0, [3.0, 4.0])])
def test_the_gradient_is_clipped_to_its_norm(limit, expected):
    parameters = vector_with_gradient([3.0, 4.0])
    config = UpdateConfig(learning_rate=0.1, max_grad_norm=limit)
    metrics = take_step(make_optimizer(parameters, config), parameters, config, 0)
    assert metrics == {"grad_norm": 5.0, "learning_rate": 0.1, "step": 1}
    assert parameters["vector"].grad.tolist() == pytest.approx(expected, rel=1e-5)
    assert parameters["vector"].tolist() == pytest.approx([-0.1, -0.1], rel=1e-5)  # Adam's first step is the sign


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_is_refused(value):
    parameters = vector_with_gradient([1.0, value])
    with pytest.raises(UserError, match=f"gradient norm is {value}"):
        take_step(make_optimizer(parameters, CONFIG), parameters, CONFIG, 0)
    assert parameters["vector"].tolist() == [0, 0]


def test_a_parameter_without_gradient_stays_and_is_saved(tmp_path):
    parameters = vector_with_gradient([3.0, 4.0]) | {"unreached": torch.nn.Parameter(torch.ones(2, 2))}
    optimizer = make_optimizer(parameters, CONFIG)
    take_step(optimizer, parameters, CONFIG, 0)
    assert parameters["unreached"].eq(1).all()
    trainer_state.save(optimizer, parameters, tmp_path, 1)
    assert trainer_state.restore(make_optimizer(parameters, CONFIG), parameters, tmp_path) == 1


def test_rollouts_of_other_weights_are_refused():
    check_on_policy("a" * 64, "a" * 64, "0001", "0000")
    with pytest.raises(UserError, match=r"rollouts 0001 .*aaaaaaaaaaaa\).* policy 0000 .*bbbbbbbbbbbb.*rollouts@0001"):
        check_on_policy("a" * 64, "b" * 64, "0001", "0000")


def floats(*rows):
    return [np.array(row, np.float32) for row in rows]


def test_sampler_gap_by_hand():
    gap = sampler_gap(floats([-1.0, -2.0], [-3.0]), floats([-1.25, -1.5], [-3.0]))
    assert gap["sampler_gap/token_mean"] == pytest.approx(0.25)
    assert gap["sampler_gap/token_max"] == pytest.approx(0.5)
    assert gap["sampler_gap/sequence_max"] == pytest.approx(0.25)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_sampler_gap_with_an_empty_completion(place):
    sampler, policy = floats([-1.0, -2.0], [-3.0]), floats([-1.25, -2.25], [-3.125])
    sampler.insert(place, np.empty(0, np.float32))
    policy.insert(place, np.empty(0, np.float32))
    gap = sampler_gap(sampler, policy)
    assert gap["sampler_gap/sequence_max"] == pytest.approx(0.5)
    assert gap["sampler_gap/token_mean"] == pytest.approx(0.625 / 3)


def test_sampler_gap_without_any_token():
    assert set(sampler_gap(floats([], []), floats([], [])).values()) == {0.0}


def gap_of(dtype, size):
    config = UpdateConfig(learning_rate=1e-3, dtype=dtype, sampler_tolerance=0.25)
    rows = Rows(floats([]), floats([]), floats([-1.0, -2.0]), np.ones(1))
    return check_gap(Totals(0.0, 0.0, floats([-1.0, -2.0 - size])), rows, config, "0003")


def test_a_gap_above_the_tolerance_is_refused_in_float32_and_told_in_bfloat16(capsys):
    assert gap_of("float32", 0.25)["sampler_gap/token_max"] == 0.25
    with pytest.raises(UserError, match=r"rollouts 0003: .* up to 0\.5 nats .*sampler_tolerance is 0\.25.*@0003"):
        gap_of("float32", 0.5)
    assert "warning" not in capsys.readouterr().err
    assert gap_of("bfloat16", 0.5)["sampler_gap/token_max"] == 0.5
    assert "warning: rollouts 0003" in capsys.readouterr().err


@pytest.mark.parametrize(("dtype", "sampled_in"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_where_either_side_is_rounded_to_bfloat16_a_gap_is_told(capsys, dtype, sampled_in):
    config = UpdateConfig(learning_rate=1e-3, dtype=dtype, sampler_warning=0.2)
    rows = Rows(floats([1, 2], [3]), floats([1, 2], [3]), floats([-1.0, -2.0], [-1.0]), np.ones(2), names_N=["a", "b"])
    gap = check_gap(Totals(0.0, 0.0, floats([-1.0, -2.25], [-1.25])), rows, config, "0003", sampled_in)
    assert gap["sampler_gap/token_mean"] == pytest.approx(0.5 / 3)
    assert gap["sampler_gap/warning"] == 0
    assert "warning" not in capsys.readouterr().err
    gap = check_gap(Totals(0.0, 0.0, floats([-1.0, -2.25], [-1.5])), rows, config, "0003", sampled_in)
    assert gap["sampler_gap/warning"] == 1
    assert "0.25 nats per token on average and up to 0.5" in (told := capsys.readouterr().err)
    assert "sampler_warning is 0.2), most in b; " in told
    assert "dvc repro rollouts@0003" in told


def test_a_refused_gap_names_the_worst_completion_and_how_many_there_are():
    rows = Rows(*[floats([1, 2], [3], [4])] * 2, floats([-1.0, -2.0], [-1.0], [-1.0]), np.ones(3), names_N=list("abc"))
    recomputed = floats([-1.0, -2.5], [-1.0], [-1.75])
    with pytest.raises(UserError, match=r"up to 0\.75 nats .* in 2 of 3 completions, most in c; .*rollouts@0003"):
        check_gap(Totals(0.0, 0.0, recomputed), rows, CONFIG, "0003")


def test_a_gap_that_is_not_a_number_is_refused():
    with pytest.raises(UserError, match="nan nats per token"):
        gap_of("float32", math.nan)


def rollouts_table(completions, prompts=None, sampled=None, fingerprint="f"):
    count = len(completions)
    return pa.table(
        {
            "iteration": [1] * count,
            "prompt_id": [f"p{row // 2}" for row in range(count)],
            "sample_index": [row % 2 for row in range(count)],
            "prompt_text": ["unused"] * count,
            "prompt_token_ids": prompts or [[5, 6]] * count,
            "completion_text": ["unused"] * count,
            "completion_token_ids": completions,
            "sampler_logprobs": sampled or [[-1.0] * len(ids) for ids in completions],
            "finish_reason": ["length"] * count,
            "seed": list(range(count)),
            "policy_fingerprint": [fingerprint] * count,
        },
        schema=ROLLOUTS,
    )


def advantages_table(advantages, trained=None, reasons=None):
    count = len(advantages)
    return pa.table(
        {
            "iteration": [1] * count,
            "prompt_id": [f"p{row // 2}" for row in range(count)],
            "sample_index": [row % 2 for row in range(count)],
            **{name: [0.0] * count for name in ("reward", "kl", "penalized_reward", "baseline")},
            "advantage": advantages,
            "in_baseline": [True] * count,
            "trained": trained or [True] * count,
            "exclusion_reason": reasons or [None] * count,
        },
        schema=ADVANTAGES,
    )


def test_rows_are_joined_by_key_and_the_untrained_left_out():
    rollouts = rollouts_table([[1], [2, 3], [4], [5, 6, 7]])
    advantages = advantages_table([1.0, -1.0, 0.0, 0.5], [True, True, False, True])
    rows = trained_rows(rollouts.take([3, 1, 2, 0]), advantages.take([2, 3, 0, 1]))
    assert [ids.tolist() for ids in rows.completions_N] == [[1], [2, 3], [5, 6, 7]]
    assert rows.advantages_N.tolist() == [1.0, -1.0, 0.5]
    assert [len(values) for values in rows.sampler_logprobs_N] == [1, 2, 3]


def test_no_trained_row_gives_no_rows():
    assert len(trained_rows(rollouts_table([[1], [2]]), advantages_table([0.0, 0.0], [False, False]))) == 0


def test_retokenize():
    tokenizer = Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
    assert tokenizer.encode(tokenizer.decode([0, 1]).replace(" ", "")).ids == [2]  # text would have lost the ids
    rows = trained_rows(rollouts_table([[0, 1], [2]]), advantages_table([1.0, -1.0]))
    (batch,) = batches(rows.prompts_N, rows.completions_N, 1000)
    masked = zip(batch.completion_ids_BT, batch.completion_mask_BT, strict=True)
    trained = {tuple(ids_T[mask_T].tolist()) for ids_T, mask_T in masked}
    assert trained == {(0, 1), (2,)}
    assert {tuple(ids) for ids in batch.input_ids_BL.tolist()} == {(5, 6, 0, 1), (5, 6, 2, 0)}
    model = make_model().double()
    totals = accumulate(model, rows, TEMPERATURE, CONFIG, 1000)
    expected = sequence_logprob(model, [5, 6], [0, 1]).item()
    assert totals.logprobs_N[0].sum() == pytest.approx(expected, abs=1e-5)


@pytest.fixture
def project(tmp_path):
    """Policy 0000 and rollouts, log-probs (without rows) and advantages 0001, as their stages leave them."""
    layout = Layout(tmp_path)
    make_policy(layout.model("0000"))
    fingerprint = write_model_manifest(layout.model("0000"), trust_remote_code=False)
    trainer_state.write_initial_state(layout.trainer_state("0000"))
    write_model_manifest(layout.trainer_state("0000"), policy_fingerprint=fingerprint)
    rows = make_rows()
    sampled = score(make_model(), rows.prompts_N, rows.completions_N, TEMPERATURE, 1000, Counter())
    lists = [[values.tolist() for values in ragged] for ragged in (rows.completions_N, rows.prompts_N, sampled)]
    write_rollouts(layout, rollouts_table(*lists, fingerprint), fingerprint)
    write_advantages(layout, rows.advantages_N.tolist())
    return layout


def write_rollouts(layout, table, fingerprint):
    entries = write_shards(layout.rollouts("0001"), 1, lambda _: table, ROLLOUTS)
    facts = {"completions_per_prompt": 2, "policy_fingerprint": fingerprint, "temperature": TEMPERATURE}
    write_shards_manifest(layout.rollouts("0001"), entries, facts)


def write_advantages(layout, values, reasons=None, **facts):
    rollouts = read_manifest(layout.rollouts("0001"))["fingerprint"]
    logprobs = write_shards_manifest(layout.logprobs("0001"), [], {"rollouts_fingerprint": rollouts})  # not read here
    facts |= {"rollouts_fingerprint": rollouts, "logprobs_fingerprint": logprobs}
    trained = None if reasons is None else [reason is None for reason in reasons]
    for path in layout.advantages("0001").glob("*"):
        path.unlink()
    entries = write_shards(
        layout.advantages("0001"), 1, lambda _: advantages_table(values, trained, reasons), ADVANTAGES
    )
    write_shards_manifest(layout.advantages("0001"), entries, facts)


def update(layout, config=CONFIG, **execution):
    link = IterationConfig(previous="0000", reference="0000")
    run(Context(layout, "0001", link, 0, ExecutionConfig(**execution)), config)


def test_the_stage_changes_weights_and_nothing_else_of_the_policy(project):
    update(project)
    old, new = project.model("0000"), project.model("0001")
    for path in old.iterdir():
        if path.name not in ("model.safetensors", "manifest.json"):
            assert (new / path.name).read_bytes() == path.read_bytes()
    assert {path.name for path in new.iterdir()} == {path.name for path in old.iterdir()}
    changed = [key for key, value in of_model(new)[1].items() if value != of_model(old)[1][key]]
    assert changed
    assert not any(key.startswith("file:") for key in changed)
    assert trainer_state.read_counters(project.trainer_state("0001")) == {"step": 1}


def test_the_stage_reports_the_step(project, by_hand):
    update(project)
    metrics = json.loads(project.metrics("update", "0001").read_text())
    assert metrics["loss"] == pytest.approx(by_hand[0], rel=1e-4)
    norm = math.sqrt(sum(gradient.square().sum().item() for gradient in by_hand[1].values()))
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert metrics["learning_rate"] == 1e-3
    assert (metrics["step"], metrics["completions"], metrics["completion_tokens"]) == (1, 6, 24)
    assert metrics["entropy"] == pytest.approx(mean_entropy(make_model().double(), make_rows()), rel=1e-5)
    assert metrics["skipped"] == 0
    assert metrics["sampler_gap/token_max"] < 1e-4


def test_the_stage_is_blind_to_microbatches_and_checkpointing(project):
    weights = {}
    for name, execution in {"small": {"update_microbatch_tokens": 1}, "re": {"gradient_checkpointing": True}}.items():
        update(project, **execution)
        weights[name] = load_model(project.model("0001"), "float32").state_dict()
    for key, value in weights["small"].items():
        # One step of Adam moves a weight by the rate times the sign, so only gradients near 0 can differ.
        assert ((value - weights["re"][key]).abs() > 1e-5).float().mean() < 1e-3


def test_the_stage_refuses_a_broken_advantage_and_publishes_nothing(project):
    write_advantages(project, [math.inf, *([0.0] * 5)])
    with pytest.raises(UserError, match="gradient norm"):
        update(project)
    assert not project.policy("0001").exists()
    assert not project.metrics("update", "0001").exists()


MASKED, FLAT, INVALID = "truncated at max_tokens", "group without signal", "no valid reward"


def test_without_a_row_to_train_on_the_policy_is_written_as_it_is(project, capsys):
    write_advantages(project, [0.0] * 6, [FLAT, FLAT, MASKED, INVALID, FLAT, FLAT], carried={"beta": 0.25})
    update(project)
    assert read_manifest(project.model("0001")) == read_manifest(project.model("0000"))
    assert of_model(project.model("0001")) == of_model(project.model("0000"))
    assert trainer_state.read_counters(project.trainer_state("0001")) == {"step": 0, "beta": 0.25}
    metrics = json.loads(project.metrics("update", "0001").read_text())
    assert metrics == {
        "loss": 0, "grad_norm": 0, "completions": 0, "completion_tokens": 0, "step": 0, "skipped": 1,
    }  # fmt: skip
    told = capsys.readouterr().err
    assert f"warning: update 0001: no completion is trained on (4: {FLAT}; 1: {MASKED}; 1: {INVALID})" in told
    assert "policy 0001 is policy 0000 unchanged" in told


def test_without_any_valid_reward_the_stage_stops(project):
    write_advantages(project, [0.0] * 6, [INVALID] * 6)
    with pytest.raises(UserError, match=r"no completion of iteration 0001 has a valid reward.*reward_error"):
        update(project)
    assert not project.policy("0001").exists()


def test_bfloat16_passes_keep_float32_master_weights_and_gradients(by_hand):
    """The passes are rounded to 8 bits of mantissa: the gradient's direction stays, its type is the weights'."""
    _, expected = by_hand
    model = make_model(0)
    config = CONFIG.model_copy(update={"dtype": "bfloat16"})
    accumulate(model, make_rows(), TEMPERATURE, config, 24)
    got = gradients(model)
    assert all(parameter.dtype == parameter.grad.dtype == torch.float32 for parameter in model.parameters())
    flat, exact = (torch.cat([g.flatten().double() for g in tensors.values()]) for tensors in (got, expected))
    assert torch.nn.functional.cosine_similarity(flat, exact, dim=0) > 0.99
