"""Positions of rows with pictures that count fewer positions than tokens."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from llmstack_model_runner.steps.moved_positions import MovedPositions

ITEMS = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 9), st.integers(-8, 3)), min_size=1, max_size=4)


@given(
    st.dictionaries(st.integers(0, 3), ITEMS), st.lists(st.tuples(st.integers(0, 3), st.integers(0, 60)), min_size=1)
)
def test_a_position_is_a_place_moved_by_all_items_that_end_before_it(
    row_to_items: dict[int, list[tuple[int, int, int]]], tokens: list[tuple[int, int]]
) -> None:
    moved, ends = MovedPositions(4), {}
    for row, items in row_to_items.items():
        end, ends[row] = 0, []
        for gap, length, delta in items:
            end += gap + length
            ends[row].append((end, delta))
        moved.set_row(row, ends[row])
    rows, places = (np.array(values, dtype=np.int64) for values in zip(*tokens, strict=True))
    expected = [place + sum(delta for end, delta in ends.get(row, []) if end <= place) for row, place in tokens]
    assert moved.of_tokens(rows, places).tolist() == expected
    for row in row_to_items:
        assert row in moved
        moved.clear_row(row)
    assert not moved
    assert moved.of_tokens(rows, places).tolist() == places.tolist()
