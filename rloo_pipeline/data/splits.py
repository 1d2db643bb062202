"""The prompts to train on and the held-out ones: one dataset each, or several put together."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa

from rloo_pipeline import seeds
from rloo_pipeline.config import PromptsConfig, SourceConfig
from rloo_pipeline.data.images import check_images, with_images
from rloo_pipeline.data.keep import LeftOut
from rloo_pipeline.data.load import hub_caches, load_kept
from rloo_pipeline.data.prompts import first_repeated, is_conversational, prompt_table
from rloo_pipeline.errors import UserError
from rloo_pipeline.schema import MIXTURE, MIXTURE_WEIGHT

Split = Literal["train", "eval"]


@dataclass(frozen=True)
class Loaded:
    """Checked prompts, and what conditions of their datasets left out."""

    table: pa.Table
    left_out: tuple[LeftOut, ...] = ()


def load_prompts(
    config: PromptsConfig, root: Path, seed: int, sources: Mapping[str, SourceConfig] = {}
) -> dict[Split, Loaded]:
    """The prompts of train and eval; raises UserError that names dataset, row and column of what cannot be used.

    Where the train datasets have weights, `mixture` tells the dataset of each row and `mixture_weight` its weight.
    sources: what DVC watches, which images that are files must be among.
    """
    watched = [source.path for source in sources.values() if source.used_by == "prompts"]
    train = _load_split(config, "train", root, watched)
    if config.eval_fraction is None:
        return {"train": train, "eval": _load_split(config, "eval", root, watched)}
    trained, held_out = split_rows(train.table, config.eval_fraction, seed)
    mixture = [name for name in (MIXTURE, MIXTURE_WEIGHT) if name in held_out.column_names]
    return {"train": Loaded(trained, train.left_out), "eval": Loaded(held_out.drop_columns(mixture))}


def split_rows(prompts: pa.Table, fraction: float, seed: int) -> tuple[pa.Table, pa.Table]:
    """Prompts to train on and about `fraction` of them held out, by a hash of (seed, prompt_id).

    A row's side depends on nothing but its id, so adding rows moves none. Raises UserError if a side is empty.
    """
    threshold = fraction * 2.0**63
    held_out_P = np.array([seeds.derive(seed, "eval", key) < threshold for key in prompts["prompt_id"].to_pylist()])
    if held_out_P.all() or not held_out_P.any():
        raise UserError(
            f"prompts.eval.fraction {fraction}: of {prompts.num_rows} prompts {held_out_P.sum()} would be held out; "
            "give more prompts, another fraction or a dataset of their own to eval"
        )
    return prompts.filter(pa.array(~held_out_P)), prompts.filter(pa.array(held_out_P))


def check_mixture(config: PromptsConfig, train: pa.Table) -> None:
    """Raise UserError if a weighted dataset has no prompt left: the others would take its share."""
    if MIXTURE in train.column_names:
        there = set(train[MIXTURE].unique().to_pylist())
        for place, dataset in enumerate(config.train):
            if place not in there:
                raise UserError(
                    f"prompts.train.{place}: no prompt is left of it to train on, so its weight {dataset.weight:g} "
                    "cannot be kept to; remove the dataset, or allow longer prompts or a smaller prompts.eval.fraction"
                )


def _load_split(config: PromptsConfig, split: Split, root: Path, watched: Sequence[Path]) -> Loaded:
    datasets = config.train if split == "train" else config.eval
    tables, names = [], []
    left_out: list[LeftOut] = []
    for number, dataset in enumerate(datasets):
        place = split if len(datasets) == 1 else f"{split}.{number}"
        folders = watched if dataset.hub is None else [*watched, *hub_caches()]
        rows = with_images(load_kept(dataset, root), config.images_column, root, folders)
        table = prompt_table(rows, dataset, config, place)
        if dataset.weight is not None:
            table = table.append_column(MIXTURE, pa.array([number] * table.num_rows, pa.int32()))
            table = table.append_column(MIXTURE_WEIGHT, pa.array([dataset.weight] * table.num_rows, pa.float64()))
        tables.append(table)
        names.append(f"prompts.{place} ({rows.source})")
        left_out += rows.left_out
    table = tables[0] if len(tables) == 1 else concatenate(tables, names)
    check_images(table, config.images_column, ", ".join(names))
    return Loaded(table, tuple(left_out))


def concatenate(tables: Sequence[pa.Table], names: Sequence[str]) -> pa.Table:
    """The rows of all tables; a column that a table lacks is null there.

    Raises UserError, with the tables' names, for columns whose types do not go together and for repeated prompt ids.
    """
    _check_kinds(tables, names)
    for column in dict.fromkeys(name for table in tables for name in table.column_names):
        _check_types(column, tables, names)
    table = pa.concat_tables(tables, promote_options="permissive")
    ids = table["prompt_id"].combine_chunks()
    if repeated := first_repeated(ids):
        owners_P = np.repeat(np.arange(len(tables)), [table.num_rows for table in tables])
        first, second = (names[owners_P[index]] for index in repeated)
        raise UserError(
            f"{first} and {second} both have the prompt_id {ids[repeated[0]].as_py()!r}; ids must differ over all "
            "datasets: rename them, or drop the column to have ids made"
        )
    return table


def _check_kinds(tables: Sequence[pa.Table], names: Sequence[str]) -> None:
    kinds = [is_conversational(table["prompt"]) for table in tables]
    if any(kinds) and not all(kinds):
        raise UserError(
            f"{names[kinds.index(False)]} has strings as prompts, {names[kinds.index(True)]} messages; give them one "
            "kind, or set prompts.system_prompt, which makes messages of strings"
        )


def _check_types(column: str, tables: Sequence[pa.Table], names: Sequence[str]) -> None:
    known: pa.Field | None = None
    for table, name in zip(tables, names, strict=True):
        if column not in table.column_names:
            continue
        field = pa.field(column, table.schema.field(column).type)
        if known is None or pa.types.is_null(known.type):
            known, owner = field, name
        elif not _together(known.type, field.type):
            raise UserError(
                f"column {column} is of type {known.type} in {owner}, but of type {field.type} in {name}; give it one "
                "type, or another name in one of them (under columns)"
            )


def _together(one: pa.DataType, other: pa.DataType) -> bool:
    """Whether values of both types stay what they are in one column; whole numbers would not among fractions."""
    try:
        both = pa.unify_schemas([pa.schema({"": one}), pa.schema({"": other})], promote_options="permissive").types[0]
    except pa.ArrowException:
        return False
    return _same(one, both) and _same(other, both)


def _same(kind: pa.DataType, both: pa.DataType) -> bool:
    """Whether values of `kind` are what they were as values of `both`, which holds them."""
    if pa.types.is_null(kind):
        return True
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _same(kind.value_type, both.value_type)
    if pa.types.is_struct(kind):
        return all(_same(field.type, both.field(field.name).type) for field in kind)
    return all(check(kind) == check(both) for check in (pa.types.is_integer, pa.types.is_uint64, _is_bytes))


def _is_bytes(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))
