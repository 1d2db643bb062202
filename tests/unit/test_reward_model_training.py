"""The training loop: gradients against float64 and TRL, whatever the microbatches; the same twice."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForSequenceClassification, BertConfig, BertModel

from rloo_pipeline.data.keep import Rows
from rloo_pipeline.data.preferences import pair_table, side_rows
from rloo_pipeline.errors import UserError
from rloo_pipeline.preference.base import Scorer, load_base
from rloo_pipeline.preference.passes import logits, score
from rloo_pipeline.preference.train import Pairs, accumulate, count_steps, pair_order, train
from rloo_pipeline.reward_model_config import RewardModelConfig
from rloo_pipeline.rewards.model import token_ids
from tests.enumeration import one_thread
from tests.tiny import make_policy, make_tokenizer
from tests.unit.test_rewards_model import make_reward_model

ROWS = [
    {
        "prompt": [{"role": "user", "content": f"Say {letter}"}],
        "chosen": [{"role": "assistant", "content": letter * count}],
        "rejected": [{"role": "assistant", "content": "no " * (count % 3)}],
    }
    for count, letter in enumerate("abcdefgh", start=1)
]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


def config(**changes: Any) -> RewardModelConfig:
    settings = {
        "model": "tiny", "train": {"file": "a.jsonl"}, "eval": {"fraction": 0.5}, "learning_rate": 1e-3,
        "batch_size": 4, "steps": 6, "max_grad_norm": None,
    }  # fmt: skip
    return RewardModelConfig.model_validate(settings | changes)


@pytest.fixture(scope="module", params=["decoder", "encoder"])
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random tiny model without a head."""
    directory = tmp_path_factory.mktemp(request.param)
    if request.param == "decoder":
        return make_policy(directory)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
        settings = {"vocab_size": 258, "max_position_embeddings": 128, "pad_token_id": 1, "initializer_range": 0.2}
        BertModel(BertConfig(**sizes, **settings)).save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)
    return directory


def tokens(scorer: Scorer, margins: bool = False) -> Pairs:
    pairs = pair_table(Rows("rows", pa.Table.from_pylist(ROWS), np.arange(len(ROWS))), "train")
    chosen, rejected = (token_ids(side_rows(pairs, side), scorer.tokenizer) for side in ("chosen", "rejected"))
    return Pairs(chosen, rejected, np.linspace(0, 0.7, len(ROWS)) if margins else np.zeros(len(ROWS)))


def gradients(model: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def test_gradient_is_that_of_float64_row_by_row_whatever_the_microbatches(base: Path) -> None:
    scorer = load_base(base, 5, "base")
    pairs, rows_B = tokens(scorer, margins=True), np.array([6, 0, 3, 7, 1, 4, 5, 2])
    exact = load_base(base, 5, "base").model.double()
    losses = []
    for row in rows_B:
        sides = (pairs.chosen_N[row], pairs.rejected_N[row])
        chosen, rejected = (exact(input_ids=torch.tensor([ids])).logits[0, 0] for ids in sides)
        losses.append(torch.log1p(torch.exp(-(chosen - rejected - pairs.margin_N[row]))))
    expected = torch.stack(losses).mean()
    expected.backward()
    for batch_tokens in (1, 100, 100_000):  # eight passes, some, one
        scorer.model.zero_grad()
        loss, difference_B = accumulate(scorer.model, pairs, rows_B, config(), batch_tokens)
        assert loss == pytest.approx(expected.item(), abs=1e-5)
        assert len(difference_B) == 8
        found = gradients(scorer.model)
        for name, gradient in gradients(exact).items():
            torch.testing.assert_close(found[name].double(), gradient, atol=1e-5, rtol=1e-3)


def test_a_pass_holds_both_sides_of_its_pairs_within_the_budget(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scorer, shapes = load_base(base, 5, "base"), []

    def recorded(model: Any, ids: Any) -> torch.Tensor:
        shapes.append((len(ids), max(map(len, ids))))
        return logits(model, ids)

    monkeypatch.setattr("rloo_pipeline.preference.train.logits", recorded)
    accumulate(scorer.model, tokens(scorer), np.arange(8), config(), 300)
    assert sum(rows for rows, _ in shapes) == 16
    assert 1 < len(shapes) < 8
    assert all(rows * width <= 300 for rows, width in shapes)


def test_a_step_is_that_of_trl(tmp_path: Path) -> None:
    """Loss and gradient of TRL's RewardTrainer on the same conversations."""
    trl = pytest.importorskip("trl")
    from datasets import Dataset

    scorer = load_base(make_policy(tmp_path / "base"), 5, "base")
    pairs = tokens(scorer, margins=True)
    rows = [{**row, "margin": margin} for row, margin in zip(ROWS, pairs.margin_N.tolist(), strict=True)]
    settings = trl.RewardConfig(
        output_dir=str(tmp_path / "trl"), per_device_train_batch_size=8, report_to=[], use_cpu=True, bf16=False
    )
    theirs = load_base(tmp_path / "base", 5, "base").model
    data = Dataset.from_list(rows)
    trainer = trl.RewardTrainer(theirs, settings, train_dataset=data, processing_class=scorer.tokenizer)
    (batch,) = trainer.get_train_dataloader()
    batch = trainer._prepare_inputs(batch)
    expected = trainer.compute_loss(trainer.model, batch)
    expected.backward()
    loss, _ = accumulate(scorer.model, pairs, np.arange(8), config(), 100_000)
    assert loss == pytest.approx(expected.item(), abs=1e-5)
    found = gradients(scorer.model)
    assert found.keys() == gradients(trainer.model).keys()
    for name, gradient in gradients(trainer.model).items():
        torch.testing.assert_close(found[name], gradient, atol=2e-6, rtol=1e-4)


def test_training_twice_is_the_same_to_the_bit_and_another_seed_is_not(base: Path) -> None:
    def trained(head: int, order: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(torch.randint(1000, ()).item())  # whatever was drawn before
        scorer = load_base(base, head, "base")
        train(scorer.model, tokens(scorer), config(), 6, order, 300)
        return scorer.model.state_dict()

    first = trained(1, 1)
    assert all(torch.equal(first[name], value) for name, value in trained(1, 1).items())
    for other in (trained(2, 1), trained(1, 2)):
        assert not all(torch.equal(first[name], value) for name, value in other.items())


def test_it_learns(base: Path) -> None:
    scorer = load_base(base, 1, "base")
    pairs = tokens(scorer)
    steps = train(scorer.model, pairs, config(batch_size=8), 40, 1, 10_000)
    assert [step.step for step in steps] == list(range(40))
    assert steps[-1].loss < 0.2 < steps[0].loss
    assert steps[-1].accuracy == 1
    rewards_2N = score(scorer.model, [*pairs.chosen_N, *pairs.rejected_N], 200, "pairs")
    assert (rewards_2N[:8] > rewards_2N[8:]).all()


def test_rates_of_the_steps(base: Path) -> None:
    scorer = load_base(base, 1, "base")
    steps = train(scorer.model, tokens(scorer), config(warmup_steps=2, batch_size=1), 6, 1, 10_000)
    rates = [step.learning_rate for step in steps]
    np.testing.assert_allclose(rates, [5e-4, 1e-3, 1e-3, 7.5e-4, 5e-4, 2.5e-4])


def test_passes_in_bfloat16_are_near_those_in_float32_and_weights_stay_float32(base: Path) -> None:
    scorer = load_base(base, 1, "base")
    pairs, rows_B = tokens(scorer), np.arange(8)
    exact, _ = accumulate(scorer.model, pairs, rows_B, config(), 10_000)
    rounded, _ = accumulate(scorer.model, pairs, rows_B, config(dtype="bfloat16"), 10_000)
    assert rounded != exact
    assert rounded == pytest.approx(exact, abs=0.05)
    assert {gradient.dtype for gradient in gradients(scorer.model).values()} == {torch.float32}


def test_dropout_is_off(base: Path) -> None:
    scorer = load_base(base, 1, "base")
    pairs = tokens(scorer)
    first, second = (accumulate(scorer.model, pairs, np.arange(8), config(), 10_000)[0] for _ in range(2))
    assert first == second


@given(st.integers(1, 30), st.integers(1, 100), st.integers(0, 5))
def test_every_pair_is_used_once_an_epoch(pairs: int, rows: int, seed: int) -> None:
    order = pair_order(pairs, rows, seed)
    assert len(order) == rows
    for start in range(0, rows, pairs):
        epoch = order[start : start + pairs]
        assert len(set(epoch)) == len(epoch)
        assert set(epoch) <= set(range(pairs))


def test_every_epoch_has_an_order_of_its_own() -> None:
    first, second = np.split(pair_order(30, 60, 1), 2)
    assert first.tolist() != second.tolist()
    assert first.tolist() != sorted(first)


def test_count_of_steps() -> None:
    assert count_steps(config(), 100) == 6
    assert count_steps(config(steps=None, epochs=1.5), 10) == 4  # 15 pairs in batches of 4
    assert count_steps(config(steps=None, epochs=0.7, batch_size=7), 10) == 1
    with pytest.raises(UserError, match="batch_size is 4, but there are 3 pairs"):
        count_steps(config(), 3)
    with pytest.raises(UserError, match=r"epochs 1.0 of 8 pairs make 2 steps, and warmup_steps is 2"):
        count_steps(config(steps=None, epochs=1, warmup_steps=2), 8)


def test_a_classifier_of_two_classes_is_no_base(tmp_path: Path, base: Path) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=2)
    model.save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(UserError, match="here: is a classifier with 2 logits, a reward model has one"):
        load_base(tmp_path, 1, "here")


def test_a_reward_model_is_trained_on_with_its_own_head(tmp_path: Path, base: Path) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1)
    model.save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    scorer = load_base(tmp_path, 1, "here")
    assert scorer.added == []
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in scorer.model.state_dict().items())


@pytest.mark.parametrize(("kind", "longest"), [("roberta", 126), ("deberta", 128)])
def test_encoders_and_the_longest_row_that_they_take(tmp_path: Path, kind: str, longest: int) -> None:
    scorer = load_base(make_reward_model(tmp_path, kind), 1, "here")
    assert scorer.longest == longest
    pairs = Pairs([[5] * longest], [[6] * longest], np.zeros(1))
    assert np.isfinite(accumulate(scorer.model, pairs, np.arange(1), config(), 1000)[0])


@pytest.mark.parametrize("kind", ["bart", "fnet", "xlnet"])
def test_a_base_whose_scores_depend_on_padding(tmp_path: Path, kind: str) -> None:
    directory = make_reward_model(tmp_path, kind)
    with pytest.raises(UserError, match="here: padding beside a row changes its score"):
        load_base(directory, 1, "here")


@pytest.mark.parametrize("fault", ["cut off", "another shape"])
def test_weights_that_cannot_be_loaded(tmp_path: Path, fault: str) -> None:
    directory = make_reward_model(tmp_path)
    if fault == "cut off":
        weights = directory / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:1000])
    else:
        settings = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps({**settings, "intermediate_size": 99}))
    with pytest.raises(UserError, match="here: no sequence classification model could be made of it"):
        load_base(directory, 1, "here")


def test_a_base_that_lacks_a_layer(tmp_path: Path) -> None:
    settings = json.loads((make_policy(tmp_path) / "config.json").read_text())
    layers = settings["num_hidden_layers"]
    settings = {**settings, "num_hidden_layers": layers + 1, "layer_types": None}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(UserError, match=rf"here: has no weights for model.layers.{layers}.*must be whole"):
        load_base(tmp_path, 1, "here")


def test_a_tokenizer_without_pad_pads_with_eos(tmp_path: Path) -> None:
    make_policy(tmp_path, pad_token_id=None)
    tokenizer = make_tokenizer()
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path)
    scorer = load_base(tmp_path, 1, "here")
    assert scorer.tokenizer.pad_token_id == scorer.model.config.pad_token_id == tokenizer.eos_token_id
