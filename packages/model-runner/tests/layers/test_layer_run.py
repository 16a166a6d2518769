"""Slices of a layer of an encoder: each row once, and about equal costs."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from llmstack_model_runner.encoders.layer_run import rows_of_slice
from llmstack_types.media import num_slices


@given(st.integers(1, 5000), st.integers(1, 60))
def test_slices_project_each_row_once_and_all_of_them_before_they_join_one(num_rows: int, slices: int) -> None:
    projected: list[int] = []
    joined: list[int] = []
    costs = []
    for index in range(slices):
        to_project, to_join = rows_of_slice(num_rows, index, slices)
        projected += to_project
        assert not to_join or len(projected) == num_rows
        joined += to_join
        costs.append(len(to_project) + 3 * len(to_join))
    assert projected == joined == [*range(num_rows)]
    assert max(costs) - min(costs) <= 6


@given(st.integers(0, 100_000), st.integers(0, 500))
def test_slices_have_at_most_their_units(num_units: int, slice_units: int) -> None:
    slices = num_slices(num_units, slice_units)
    assert slices == 1 if not slice_units else num_units <= slices * slice_units
    assert slices == 1 or num_units > (slices - 1) * slice_units
