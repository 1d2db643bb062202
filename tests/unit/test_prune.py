"""The rule of a prune, the listing of iterations, and the count of bytes."""

import os
from pathlib import Path

import pytest

from rloo_pipeline.config import parse_params
from rloo_pipeline.prune import ranges
from rloo_pipeline.prune_plan import Rule, choose, disk_bytes
from tests.project import PARAMS


def chain(count: int, reference: str = "0000") -> dict[str, dict[str, str]]:
    return {f"{n:04d}": {"previous": f"{n - 1:04d}", "reference": reference if n > int(reference) else "0000"}
            for n in range(1, count + 1)}  # fmt: skip


@pytest.mark.parametrize(
    ("rule", "kept"),
    [
        (Rule(1), ["0006"]),
        (Rule(3), ["0004", "0005", "0006"]),
        (Rule(9), ["0001", "0002", "0003", "0004", "0005", "0006"]),
        (Rule(1, 2), ["0002", "0004", "0006"]),
        (Rule(1, 4), ["0004", "0006"]),
        (Rule(2, 100), ["0005", "0006"]),
    ],
)
def test_the_last_n_and_every_mth_of_the_finished_iterations_stay(rule: Rule, kept: list[str]) -> None:
    params = parse_params(PARAMS | {"iterations": chain(9)})
    assert list(choose(params, [f"{n:04d}" for n in range(1, 7)], rule, {})) == kept


def test_the_reference_of_the_next_iteration_and_what_a_stage_still_reads_stay() -> None:
    params = parse_params(PARAMS | {"iterations": chain(6, reference="0002")})
    finished = [f"{n:04d}" for n in range(1, 7)]
    assert choose(params, finished, Rule(1), {"0004": "evaluate@0004"}) == {
        "0002": "the reference",
        "0004": "evaluate@0004 is not up to date and reads it",
        "0006": "the last 1",
    }


def test_nothing_is_chosen_of_a_chain_without_a_finished_iteration() -> None:
    assert choose(parse_params(PARAMS), [], Rule(1), {}) == {}


def test_ranges() -> None:
    assert ranges([]) == "-"
    assert ranges(["0003", "0001", "0002", "0005", "0007", "0008"]) == "0001-0003, 0005, 0007-0008"


def test_a_file_counts_when_its_last_name_goes(tmp_path: Path) -> None:
    work, cache, lone = tmp_path / "work", tmp_path / "cache", tmp_path / "lone"
    work.write_bytes(os.urandom(100_000))
    cache.hardlink_to(work)
    lone.write_bytes(os.urandom(5_000))
    size = {path: os.stat(path).st_blocks * 512 for path in (work, lone)}  # noqa: PTH116
    assert disk_bytes([work, cache, lone, tmp_path]) == size[work] + size[lone]
    assert disk_bytes([work, lone], last_links=True) == size[lone]
    assert disk_bytes([work, cache], last_links=True) == size[work] >= 100_000
