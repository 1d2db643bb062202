import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from rloo_pipeline.policy.batches import collate, plan, rows_of

LENGTHS = st.lists(st.integers(1, 50), min_size=1, max_size=40).map(np.array)


@given(LENGTHS, st.integers(1, 200))
def test_a_plan_holds_every_row_once_within_the_budget(lengths_N, batch_tokens):
    planned = plan(lengths_N, batch_tokens)
    assert sorted(np.concatenate(planned)) == list(range(len(lengths_N)))
    for rows_B in planned:
        assert len(rows_B) == 1 or len(rows_B) * lengths_N[rows_B].max() <= batch_tokens
    widths = [lengths_N[rows_B].max() for rows_B in planned]
    assert widths == sorted(widths, reverse=True)


def test_a_batch_by_hand():
    batch = collate([[5, 6], [7, 8, 9]], [[1], [2, 3]], np.array([1, 0]))
    assert batch.input_ids_BL.tolist() == [[7, 8, 9, 2, 3], [5, 6, 1, 0, 0]]
    assert batch.attention_mask_BL.tolist() == [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]
    assert batch.completion_ids_BT.tolist() == [[2, 3], [1, 0]]
    assert batch.completion_mask_BT.tolist() == [[True, True], [True, False]]
    assert batch.before_BT[0].tolist() == [2, 3]
    assert batch.before_BT[1, 0] == 1
    assert batch.rows_B.tolist() == [1, 0]


def test_an_empty_completion_has_no_token():
    batch = collate([[5, 6], [7]], [[], [1, 2]], np.arange(2))
    assert batch.completion_mask_BT.tolist() == [[False, False], [True, True]]
    assert batch.attention_mask_BL.sum(-1).tolist() == [2, 3]


@given(st.lists(st.lists(st.integers(0, 9), max_size=4), max_size=6), st.integers(0, 6))
def test_rows_of_a_column_in_any_chunks(rows, cut):
    kind = pa.list_(pa.int32())
    column = pa.chunked_array([pa.array(rows[:cut], kind), pa.array(rows[cut:], kind)])
    assert [row.tolist() for row in rows_of(pa.table({"ids": column}), "ids")] == rows
    sliced = pa.table({"ids": column})[1:]
    assert [row.tolist() for row in rows_of(sliced, "ids")] == rows[1:]
