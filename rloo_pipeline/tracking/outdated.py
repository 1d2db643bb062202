"""Which records tell of inputs that are no longer there: those that `dvc repro` has still to make again."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from rloo_pipeline.config import Params
from rloo_pipeline.errors import UserError
from rloo_pipeline.fingerprint import MANIFEST
from rloo_pipeline.layout import INITIAL, STAGES, Layout

Key = tuple[str, str]  # stage, iteration
Read = Callable[[Path], dict[str, Any]]


def outdated_records(layout: Layout, params: Params, lock: Mapping[str, Any]) -> set[Key]:
    """The (stage, iteration) that were made from other inputs than there are now, and all that came of them.

    The provenance tells, or dvc.lock (parsed) for a stage that DVC restored from its cache, which leaves the provenance
    of another run beside it. An input that is not here (pruned, not pulled) says nothing.
    """
    found: set[Key] = set()
    vouched = _vouched(layout, lock)
    read = cache(read_json)
    for iteration in (INITIAL, *params.iterations):
        for stage in STAGES:
            key = (stage, iteration)
            for maker, made_from, now in _inputs(layout, params, key, read):
                if key not in vouched and (maker in found or now not in (None, made_from)):
                    found.add(key)
    return found


def _vouched(layout: Layout, lock: Mapping[str, Any]) -> set[Key]:
    """The stages whose metrics are those in dvc.lock, and whose inputs there are the outputs of such stages."""
    entries = {key: entry for entry in lock.get("stages", {}).values() if (key := _key_of(entry))}
    made = {out["path"]: (key, out.get("md5")) for key, entry in entries.items() for out in entry["outs"]}
    found: set[Key] = set()
    for key, entry in sorted(entries.items(), key=lambda item: (item[0][1], STAGES.index(item[0][0]))):
        makers = [(dep, _maker_of(dep["path"], made)) for dep in entry.get("deps", ())]
        wrong = [
            dep for dep, maker in makers if maker and (maker[0] not in found or maker[1] not in (None, dep["md5"]))
        ]
        if not wrong and md5_of(layout.metrics(*key)) == made[f"metrics/{key[0]}/{key[1]}.json"][1]:
            found.add(key)
    return found


def _key_of(entry: Mapping[str, Any]) -> Key | None:
    """The stage and iteration of an entry of dvc.lock, by its metrics file."""
    paths = (Path(out["path"]).parts for out in entry.get("outs", ()))
    return next(((parts[1], parts[2][:4]) for parts in paths if parts[0] == "metrics" and parts[1] in STAGES), None)


def _maker_of(path: str, made: Mapping[str, tuple[Key, str]]) -> tuple[Key, str | None] | None:
    """Who makes a file or directory and with which hash; without the hash for a part of an output."""
    if path in made:
        return made[path]
    whole = next((str(parent) for parent in Path(path).parents if str(parent) in made), None)
    return None if whole is None else (made[whole][0], None)


def md5_of(path: Path) -> str | None:
    """The hash that DVC has of a file; None if there is no such file."""
    return hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest() if path.exists() else None


def _inputs(layout: Layout, params: Params, key: Key, read: Read) -> Iterator[tuple[Key, str, str | None]]:
    """(the record that made it, the fingerprint it was used with, its fingerprint now) of each input."""
    stage, iteration = key
    link = params.iterations.get(iteration)
    previous, reference = (link.previous, link.reference) if link else (INITIAL, INITIAL)
    policies = {"policy": iteration if stage == "evaluate" else previous, "reference": reference}
    for name, made_from in read(layout.provenance(stage, iteration)).get("inputs", {}).items():
        if name in policies:
            now = read(layout.model(policies[name]) / MANIFEST).get("fingerprint")
            yield _maker(policies[name]), made_from, now
        elif name == "trainer_state":
            yield _maker(previous), made_from, read(layout.trainer_state(previous) / MANIFEST).get("fingerprint")
        elif name == "prompts":
            split = "eval" if stage == "evaluate" else "train"
            yield ("prepare", INITIAL), made_from, prompts_fingerprint(layout.prompts / f"{split}.parquet")
        elif name in STAGES:
            yield (name, iteration), made_from, read(layout.provenance(name, iteration)).get("output")


def _maker(policy: str) -> Key:
    return ("prepare", INITIAL) if policy == INITIAL else ("update", policy)


@cache
def _prompts_fingerprint(path: Path, _modified: int) -> str | None:
    import pyarrow.parquet as pq

    fingerprint: bytes | None = (pq.read_schema(path).metadata or {}).get(b"fingerprint")
    return fingerprint.decode() if fingerprint else None


def prompts_fingerprint(path: Path) -> str | None:
    """The fingerprint of a prompt table as its file tells it; None if there is no such file."""
    return _prompts_fingerprint(path.resolve(), path.stat().st_mtime_ns) if path.exists() else None


def read_json(path: Path, remedy: str = "run the stage that makes it again") -> dict[str, Any]:
    """A JSON object from a file, empty if there is none; raises UserError with the remedy if it is broken."""
    if not path.exists():
        return {}
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path}: not readable as JSON ({error}); {remedy}") from error
    if not isinstance(values, dict):
        raise UserError(f"{path}: not a JSON object; {remedy}")
    return values
