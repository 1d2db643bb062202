"""The same advantages, loss and gradient as TRL's RLOOTrainer on completions that it sampled itself."""

import numpy as np
import pytest
import torch

from rloo_pipeline.objective import advantages
from rloo_pipeline.objective.clipped_loss import sequence_clipped_loss
from rloo_pipeline.objective.distribution import token_logprobs_of
from rloo_pipeline.objective.groups import index_groups
from rloo_pipeline.objective.kl import sequence_kl, token_kl
from rloo_pipeline.objective.loss import sequence_loss
from tests.tiny import make_model, make_policy, make_tokenizer

K, BETA, TEMPERATURE, CLIP = 4, 0.3, 0.8, (0.5, 2.0)
PROMPTS = [prompt for prompt in ("one", "two and more", "three") for _ in range(K)]


def reward(completions, **_):
    """Any number that differs between completions, and none for the sixth."""
    return [None if row == 5 else float(sum(map(ord, text)) % 4) for row, text in enumerate(completions)]


@pytest.fixture(params=[False, True], ids=["plain", "normalized"])
def trainer(request, tmp_path):
    trl = pytest.importorskip("trl")
    from datasets import Dataset

    config = trl.RLOOConfig(
        output_dir=str(tmp_path), per_device_train_batch_size=len(PROMPTS), num_generations=K, beta=BETA, seed=3,
        max_completion_length=24, temperature=TEMPERATURE, reward_clip_range=CLIP, report_to=[], use_cpu=True,
        normalize_advantages=request.param, bf16=False, disable_dropout=True, gradient_checkpointing=False,
    )  # fmt: skip
    trainer = trl.RLOOTrainer(
        model=str(make_policy(tmp_path / "policy")),
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": PROMPTS[::K]}),
        processing_class=make_tokenizer(),
    )
    # TRL loads the reference from where the policy came from; other weights make the KL differ from 0.
    trainer.ref_model.load_state_dict(make_model(1).state_dict())
    # A random policy samples EOS seldom; with more ids that end a completion the lengths differ.
    trainer.eos_token_ids = trainer.generation_config.eos_token_id = list(range(1, 30))
    return trainer


def logprobs_of(model, batch):
    """Log-probs [N, T] of TRL's completions, row by row without padding, by the code under test."""
    width = batch["completion_ids"].shape[1]
    rows = []
    for row in range(len(PROMPTS)):
        prompt, completion = (
            batch[f"{part}_ids"][row][batch[f"{part}_mask"][row].bool()] for part in ("prompt", "completion")
        )
        logits = model(input_ids=torch.cat([prompt, completion])[None]).logits[0, len(prompt) - 1 : -1]
        logprobs = token_logprobs_of(logits, completion, TEMPERATURE)
        rows.append(torch.nn.functional.pad(logprobs, (0, width - len(completion))))
    return torch.stack(rows)


def gradient_of(loss, model):
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])


def test_rloo_equals_trl(trainer):
    batch = trainer._generate_and_score_completions([{"prompt": prompt} for prompt in PROMPTS])
    mask_NT = batch["completion_mask"].bool()
    lengths = mask_NT.sum(-1).numpy()
    assert len(set(lengths)) > 1
    texts = make_tokenizer().batch_decode(
        [ids[mask] for ids, mask in zip(batch["completion_ids"], mask_NT, strict=True)], skip_special_tokens=True
    )

    policy = make_model(0)
    logprobs_NT, reference_NT = logprobs_of(policy, batch), logprobs_of(make_model(1), batch).detach()
    kl_N = sequence_kl(
        token_kl(logprobs_NT.detach()[mask_NT].numpy(), reference_NT[mask_NT].numpy()),
        np.concatenate([[0], lengths.cumsum()]),
    )
    rewards_N = np.array(reward(texts), float)
    groups_N, names_G = index_groups(PROMPTS)
    found = advantages.compute(
        rewards_N, kl_N, groups_N, ~np.isnan(rewards_N), names_G=names_G, completions_per_prompt=K, beta=BETA,
        reward_clip_range=CLIP, normalize=trainer.normalize_advantages,
    )  # fmt: skip
    np.testing.assert_allclose(found.advantage_N, batch["advantages"].numpy(), rtol=0, atol=1e-4)

    # TRL divides by all rows, the unscored one among them; here that is the denominator's business.
    advantages_N = torch.from_numpy(found.advantage_N)
    theirs = trainer._compute_loss(trainer.model, batch)
    ours = sequence_clipped_loss(logprobs_NT, logprobs_NT.detach(), mask_NT, advantages_N, len(PROMPTS), 0.2, 0.2)
    assert ours.loss.item() == pytest.approx(theirs.item(), abs=1e-5)
    plain = sequence_loss(logprobs_NT, mask_NT, advantages_N, len(PROMPTS))
    expected = gradient_of(theirs, trainer.model)
    torch.testing.assert_close(gradient_of(plain, policy), expected, rtol=0, atol=1e-4 * float(expected.abs().max()))
