"""What differs between two Arrow arrays, pair by pair."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

Array = npt.NDArray[Any]


def unnamed(kind: pa.DataType) -> pa.DataType:
    """The type with the child of every list called item: Parquet files name it otherwise."""
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return pa.list_(pa.field("item", unnamed(kind.value_type)))
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(field.name, unnamed(field.type)) for field in kind])
    return kind


def whole(column: pa.ChunkedArray) -> pa.Array:
    """The column as one array, dictionaries decoded."""
    array = pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)
    return array.dictionary_decode() if pa.types.is_dictionary(array.type) else array


def differences(left: pa.Array, right: pa.Array) -> tuple[Array, Array]:
    """For each of N pairs: how many values differ, and the largest absolute difference between numbers (NaN: none)."""
    valid_left, valid_right = (array.is_valid().to_numpy(zero_copy_only=False) for array in (left, right))
    both_N = valid_left & valid_right
    values_N = (valid_left != valid_right).astype(np.int64)
    sizes_N = np.full(len(left), np.nan)
    chosen = pa.array(both_N)
    values_N[both_N], sizes_N[both_N] = _of_valid(left.filter(chosen), right.filter(chosen))
    return values_N, sizes_N


def _of_valid(left: pa.Array, right: pa.Array) -> tuple[Array, Array]:
    kind = left.type
    none = np.full(len(left), np.nan)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _of_lists(left, right)
    if pa.types.is_struct(kind):
        parts = [differences(ours, theirs) for ours, theirs in zip(left.flatten(), right.flatten(), strict=True)]
        values = np.sum([values for values, _ in parts], axis=0, dtype=np.int64) if parts else np.zeros(len(left), int)
        return np.minimum(values, 1), np.fmax.reduce([none, *(sizes for _, sizes in parts)])
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        ours, theirs = left.to_numpy(zero_copy_only=False), right.to_numpy(zero_copy_only=False)
        differs = ours != theirs
        if pa.types.is_floating(kind):
            differs = (differs | (np.signbit(ours) != np.signbit(theirs))) & ~(np.isnan(ours) & np.isnan(theirs))
        with np.errstate(invalid="ignore"):
            sizes = np.abs(ours.astype(np.float64) - theirs.astype(np.float64))
        return differs.astype(np.int64), np.where(differs, sizes, np.nan)
    try:
        return pc.not_equal(left, right).to_numpy(zero_copy_only=False).astype(np.int64), none
    except pa.ArrowNotImplementedError:
        pairs = zip(left.to_pylist(), right.to_pylist(), strict=True)
        return np.array([ours != theirs for ours, theirs in pairs], dtype=np.int64), none


def _of_lists(left: pa.Array, right: pa.Array) -> tuple[Array, Array]:
    lengths = [pc.list_value_length(array).to_numpy(zero_copy_only=False).astype(np.int64) for array in (left, right)]
    common_N = np.minimum(*lengths)
    owners_T = np.repeat(np.arange(len(left)), common_N)
    within_T = np.arange(len(owners_T)) - np.repeat(np.cumsum(common_N) - common_N, common_N)
    starts = [np.cumsum(length_N) - length_N for length_N in lengths]
    pairs = [
        array.flatten().take(pa.array(start_N[owners_T] + within_T))
        for array, start_N in zip((left, right), starts, strict=True)
    ]
    values_T, sizes_T = differences(*pairs)
    values_N = np.abs(lengths[0] - lengths[1]) + np.bincount(owners_T, values_T, len(left)).astype(np.int64)
    sizes_N = np.full(len(left), np.nan)
    np.fmax.at(sizes_N, owners_T, sizes_T)
    return values_N, sizes_N


def first_difference(left: Sequence[Any], right: Sequence[Any]) -> int:
    """Place of the first element or character that differs; the shorter length if one is the beginning of the other."""
    for position, (ours, theirs) in enumerate(zip(left, right, strict=False)):
        if not _equal(ours, theirs):
            return position
    return min(len(left), len(right))


def _equal(left: Any, right: Any) -> bool:
    # repr tells -0.0 from 0.0 and finds NaN equal to NaN, inside lists and structs too.
    return repr(left) == repr(right)
