"""Whether reward models can be trained: their base and their pairs."""

import pyarrow as pa

from rloo_pipeline.check.memory import TRAINING_BYTES, Need
from rloo_pipeline.check.models import examine
from rloo_pipeline.check.report import Report
from rloo_pipeline.data.load import load_kept
from rloo_pipeline.data.preferences import pair_table, shared_pairs
from rloo_pipeline.data_config import TableConfig
from rloo_pipeline.layout import Layout
from rloo_pipeline.reward_model_config import RewardModelConfig


def look_at(name: str, config: RewardModelConfig, layout: Layout, report: Report) -> Need | None:
    """Read the pairs, look at the base without its weights; returns what training takes."""
    where = f"reward_models, {name}"
    found: dict[str, pa.Table] = {}
    for split, dataset in (("train", config.train), ("eval", config.eval)):
        if dataset.fraction is None:
            pairs = report.attempt(where, _pairs, dataset, split, layout)
            if pairs is not None:
                report.ok(where, f"{split}: {pairs.num_rows} pairs")
                found[split] = pairs
    if len(found) == 2 and (both := shared_pairs(found["train"], found["eval"])):
        text = f"{both} of {found['eval'].num_rows} held-out pairs are trained on too, so they are not held out"
        report.warning(where, text)
    base = examine(where, config.model, config.revision, layout.root, "AutoModelForSequenceClassification", report)
    if base is None:
        return None
    report.ok(
        where, f"base {config.model}: {base.parameters / 1e6:.1f} M parameters, context {base.context or 'unknown'}"
    )
    trained = base.parameters * TRAINING_BYTES
    return Need(where, {"weights, gradients and AdamW": trained}, trained)


def _pairs(dataset: TableConfig, split: str, layout: Layout) -> pa.Table:
    return pair_table(load_kept(dataset, layout.root), split)
