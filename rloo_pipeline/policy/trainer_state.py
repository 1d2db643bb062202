"""State that crosses iterations: the optimizer's moments, counters and what advantages hand on, without pickle."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rloo_pipeline.disk import refusals_told
from rloo_pipeline.errors import UserError
from rloo_pipeline.files import write_json
from rloo_pipeline.manifest import RESTORE, checked_fingerprint, read_manifest

if TYPE_CHECKING:
    import torch

STATE = "state.json"
MOMENTS = "optimizer.safetensors"
MOMENT_NAMES = ("exp_avg", "exp_avg_sq")


def write_initial_state(directory: Path) -> None:
    """The trainer state before the first optimizer step."""
    write_json(directory / STATE, {"step": 0})


def checked_state(directory: Path, policy_fingerprint: str) -> str:
    """The fingerprint of a trainer state; raises UserError if its files changed or it is not of this policy."""
    found = checked_fingerprint(directory)
    written_with = read_manifest(directory)["facts"].get("policy_fingerprint")
    if written_with != policy_fingerprint:
        raise UserError(
            f"{directory}: written with other weights ({str(written_with)[:12]}) than those of its policy "
            f"({policy_fingerprint[:12]}); restore model/ and trainer_state/ together with `dvc checkout` or run the "
            "stage that makes them again"
        )
    return found


def read_counters(directory: Path) -> dict[str, Any]:
    """What state.json holds: `step`, the optimizer steps done so far, and the state that advantages asked to carry."""
    path = directory / STATE
    try:
        counters: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: not readable ({error}); restore it with `dvc checkout`") from error
    return counters


def restore(optimizer: "torch.optim.Optimizer", names: dict[str, "torch.nn.Parameter"], directory: Path) -> int:
    """Put the saved moments back into the optimizer, by parameter name; returns the steps done so far."""
    import torch
    from safetensors import safe_open

    step = int(read_counters(directory)["step"])
    if step == 0:
        return 0
    if not (directory / MOMENTS).is_file():
        raise UserError(f"{directory / MOMENTS}: no such file, though {step} steps are done; {RESTORE}")
    with safe_open(directory / MOMENTS, framework="pt") as file:
        expected = {f"{moment}/{name}" for name in names for moment in MOMENT_NAMES}
        if set(file.keys()) != expected:
            wrong = sorted(set(file.keys()) ^ expected)
            raise UserError(
                f"{directory / MOMENTS}: {wrong[0]} and {len(wrong) - 1} more do not fit the policy's weights"
            )
        for name, parameter in names.items():
            moments = {moment: file.get_tensor(f"{moment}/{name}").to(parameter.device) for moment in MOMENT_NAMES}
            optimizer.state[parameter] = {"step": torch.tensor(float(step)), **moments}
    return step


def save(
    optimizer: "torch.optim.Optimizer",
    names: dict[str, "torch.nn.Parameter"],
    directory: Path,
    step: int,
    carried: Mapping[str, Any] | None = None,
) -> None:
    """Write the optimizer's moments by parameter name, the steps done, and what advantages hand on (JSON values)."""
    from safetensors.torch import save_file

    directory.mkdir(parents=True, exist_ok=True)
    moments = {
        f"{moment}/{name}": optimizer.state[parameter][moment].contiguous().cpu()
        for name, parameter in names.items()
        for moment in MOMENT_NAMES
    }
    with refusals_told(directory / MOMENTS):
        save_file(moments, directory / MOMENTS)
    write_json(directory / STATE, {"step": step, **(carried or {})})


def keep(previous: Path, directory: Path, carried: Mapping[str, Any] | None = None) -> int:
    """Write what `save` would after no step: the same moments, if any, and count; returns the steps done so far."""
    step = int(read_counters(previous)["step"])
    directory.mkdir(parents=True, exist_ok=True)
    if step:
        shutil.copyfile(previous / MOMENTS, directory / MOMENTS)
    write_json(directory / STATE, {"step": step, **(carried or {})})
    return step
