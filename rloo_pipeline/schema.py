"""The Arrow schema of every artifact; each field's metadata tells its meaning and unit."""

from collections.abc import Sequence

import pyarrow as pa

SCHEMA_VERSION = 1

Spec = tuple[str, pa.DataType, bool, str]  # name, type, nullable, meaning


def _schema(specs: Sequence[Spec]) -> pa.Schema:
    return pa.schema([pa.field(name, kind, nullable, {"meaning": meaning}) for name, kind, nullable, meaning in specs])


KEYS: tuple[Spec, ...] = (
    ("iteration", pa.int32(), False, "the iteration that the row belongs to; in an evaluation, the policy evaluated"),
    ("prompt_id", pa.string(), False, "the prompt's id; a group is (iteration, prompt_id)"),
    ("sample_index", pa.int32(), False, "0 .. K-1 within the group"),
)
KEY_NAMES = tuple(spec[0] for spec in KEYS)

COMPLETION: tuple[Spec, ...] = (
    ("prompt_text", pa.string(), False, "the prompt after the chat template, as the policy saw it"),
    ("prompt_token_ids", pa.list_(pa.int32()), False, "token ids of the prompt"),
    ("completion_text", pa.string(), False, "the completion decoded without special tokens; untrusted"),
    ("completion_token_ids", pa.list_(pa.int32()), False, "sampled token ids, a sampled EOS included"),
    ("sampler_logprobs", pa.list_(pa.float32()), False, "log-prob of each sampled id in the sampler, nats"),
    ("finish_reason", pa.string(), False, "stop: EOS was sampled; length: cut at max_tokens"),
    ("seed", pa.int64(), False, "seed of this completion's sampling"),
    ("policy_fingerprint", pa.string(), False, "fingerprint of the weights that sampled it"),
)

ROLLOUTS = _schema((*KEYS, *COMPLETION))

LOGPROBS = _schema(
    (
        *KEYS,
        ("policy_logprobs", pa.list_(pa.float32()), False, "log-prob of each sampled id, policy, nats"),
        (
            "reference_logprobs",
            pa.list_(pa.float32()),
            True,
            "log-prob of each sampled id, reference, nats; null if logprobs.reference is false",
        ),
    )
)

REWARD_SPECS: tuple[Spec, ...] = (
    ("reward", pa.float32(), True, "weighted sum of the clipped scores that apply; null: none applies, or one failed"),
    ("reward_error", pa.string(), True, "why the row has no valid reward, and which components of weight 0 failed"),
    ("reward_extra", pa.string(), True, "what reward functions logged of the row by log_extra, JSON object by column"),
)

ADVANTAGES = _schema(
    (
        *KEYS,
        ("reward", pa.float64(), True, "reward, clipped if asked and nothing else; null: invalid row"),
        ("kl", pa.float64(), True, "KL estimate of the completion against the reference, nats, by advantages.kl_*"),
        ("penalized_reward", pa.float64(), True, "reward - penalty of a truncated completion, if asked - beta * kl"),
        ("baseline", pa.float64(), True, "what is subtracted from the penalized reward"),
        ("advantage", pa.float64(), False, "weight of the completion's log-prob in the loss; 0 if not trained"),
        ("in_baseline", pa.bool_(), False, "the row counts in its siblings' baseline"),
        ("trained", pa.bool_(), False, "the row counts in the loss and its denominator"),
        ("exclusion_reason", pa.string(), True, "why the row is not trained on"),
    )
)

CALL_ARGUMENTS = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
MIXTURE, MIXTURE_WEIGHT = "mixture", "mixture_weight"  # of a prompt: the place of its dataset and its weight
RESERVED_COLUMNS = frozenset(
    {spec[0] for spec in (*COMPLETION, *REWARD_SPECS)} | {"iteration", "sample_index", MIXTURE, MIXTURE_WEIGHT}
    | set(LOGPROBS.names) - {"prompt_id"} | set(ADVANTAGES.names) - {"prompt_id"} | set(CALL_ARGUMENTS)
)  # fmt: skip


DATASET_REWARD = "dataset_reward"
DATASET_REWARD_SPEC: Spec = (
    DATASET_REWARD,
    pa.float32(),
    True,
    "reward of the dataset's own completion of the prompt, by evaluate.opponent_column; null: none, or not valid",
)


def reward_column(name: str) -> str:
    """The column that holds the scores of the reward component `name`."""
    return f"reward/{name}"


def rewards_schema(names: Sequence[str]) -> pa.Schema:
    """The schema of rewards with one nullable float32 column for each component."""
    components = [(reward_column(name), pa.float32(), True, f"score of component {name}, unclipped") for name in names]
    return _schema((*KEYS, *components, *REWARD_SPECS))


def evaluation_schema(names: Sequence[str]) -> pa.Schema:
    """The schema of evaluation: completions, their rewards and their KL to the reference."""
    components = [(reward_column(name), pa.float32(), True, f"score of component {name}, unclipped") for name in names]
    kl: Spec = ("kl", pa.float64(), False, "sum of sampler minus reference log-probs, nats")
    return _schema((*KEYS, *COMPLETION, *components, *REWARD_SPECS, kl, DATASET_REWARD_SPEC))


STEPS = _schema(
    (
        ("step", pa.int32(), False, "optimizer step of a reward model's training, from 0"),
        ("loss", pa.float64(), False, "mean loss over the step's pairs before it, nats"),
        ("accuracy", pa.float64(), False, "share of the step's pairs that chosen wins before it, ties half"),
        ("grad_norm", pa.float64(), False, "gradient norm before clipping"),
        ("learning_rate", pa.float64(), False, "rate of the step"),
    )
)


def preferences_schema(text: pa.DataType) -> pa.Schema:
    """The schema of held-out pairs as a reward model scores them; text: string, or that of messages."""
    return _schema(
        (
            ("pair_id", pa.string(), False, "the pair's id: <split>-<row of its table>"),
            ("prompt", text, False, "what both completions answer"),
            ("chosen", text, False, "the preferred completion"),
            ("rejected", text, False, "the other completion"),
            ("margin", pa.float64(), False, "margin that the loss asks for; 0 if the table has none"),
            ("chosen_reward", pa.float32(), False, "logit of the prompt with chosen"),
            ("rejected_reward", pa.float32(), False, "logit of the prompt with rejected"),
        )
    )
