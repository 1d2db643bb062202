"""A stage whose results change has its number in algorithms.yaml raised."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rloo_pipeline.layout import STAGES
from tests.contract.behaviour import FILE, Behaviour, close, of_stage, of_variant, summary, versions
from tests.contract.variants import VARIANTS
from tests.project import Project

REGENERATE = "python -m tests.contract.behaviour"


def differences(stored: Behaviour, found: Behaviour) -> list[str]:
    """What differs, by the name of a column or tensor."""
    if stored["numbers"].keys() != found["numbers"].keys():
        return sorted(stored["numbers"].keys() ^ found["numbers"].keys())
    different = [
        f"{name}: {found['numbers'][name]} in place of {numbers}"
        for name, numbers in stored["numbers"].items()
        if not close(numbers, found["numbers"][name])
    ]
    return different + ["ids, texts, names or counts"] * (stored["sha256"] != found["sha256"])


def complaint(stage: str, stored: dict[str, Any], version: int, found: Behaviour) -> str | None:
    """What is wrong between the stored behaviour of a stage and its present one; None if nothing is."""
    if version != stored["version"]:
        return (
            f"{stage} has number {version} in algorithms.yaml, but tests/contract/behaviour.json is of number "
            f"{stored['version']}: write it anew with {REGENERATE}"
        )
    different = differences(stored, found)
    if different:
        return (
            f"results of {stage} changed, but its number in algorithms.yaml is {version} still, so finished projects "
            f"would keep the old ones: raise it and run {REGENERATE} (or mend the stage). Changed: {different[:5]}"
        )
    return None


@pytest.mark.parametrize("stage", STAGES)
def test_behaviour(finished_project: Project, stage: str) -> None:
    stored = json.loads(FILE.read_text(encoding="utf-8"))
    found = complaint(stage, stored[stage], versions()[stage], of_stage(finished_project, stage))
    assert found is None, found


@pytest.mark.parametrize(("stage", "name"), [(stage, name) for stage in VARIANTS for name in VARIANTS[stage]])
def test_behaviour_by_other_settings(finished_project: Project, tmp_path: Path, stage: str, name: str) -> None:
    stored = json.loads(FILE.read_text(encoding="utf-8"))[stage]
    assert list(stored["variants"]) == sorted(VARIANTS[stage])
    variant = {"version": stored["version"], **stored["variants"][name]}
    found = complaint(stage, variant, versions()[stage], of_variant(finished_project.root, tmp_path, stage, name))
    assert found is None, f"with the settings {name}: {found}"


def test_changed_results_are_complained_of() -> None:
    stored = {"version": 1, "sha256": "a", "numbers": {"reward": [0.5, 0.6, 0.1]}}
    same: Behaviour = {"sha256": "a", "numbers": {"reward": [0.5001, 0.6, 0.1]}}
    assert complaint("rewards", stored, 1, same) is None
    for changes in ({"sha256": "b"}, {"numbers": {"reward": [0.51, 0.6, 0.1]}}, {"numbers": {"other": [1.0]}}):
        assert "results of rewards changed" in str(complaint("rewards", stored, 1, {**same, **changes}))
    assert "is of number 1: write it anew" in str(complaint("rewards", stored, 2, same))


@pytest.mark.parametrize("scale", [1.0, 1e-9])
def test_order_and_size_count(scale: float) -> None:
    values = np.array([1.0, 2.0, 4.0]) * scale
    assert close(summary(values), summary(values * (1 + 1e-5)))
    assert not close(summary(values), summary(values[::-1]))
    assert not close(summary(values), summary(values * 1.01))
    assert not close(summary(values), summary(values[:0]))
