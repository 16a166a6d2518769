"""How the bytes of a cache are divided among keys and values and states."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from llmstack_types import KVCacheSpec
from llmstack_types.model_runner import LEAST_STATE_BLOCKS

MIB = 1 << 20


def spec(bytes_per_block: int, bytes_per_state: int) -> KVCacheSpec:
    return KVCacheSpec(1, 16, "float32", bytes_per_block, 97, bytes_per_state=bytes_per_state)


@given(
    bytes_per_block=st.integers(1, 4 * MIB),
    bytes_per_state=st.integers(1, 200 * MIB),
    num_bytes=st.integers(0, 1 << 40),
    max_num_rows=st.integers(1, 1024),
    num_row_blocks=st.integers(1, 20_000),
)
def test_a_budget_is_never_exceeded_and_lets_as_many_rows_run_as_it_says(
    bytes_per_block: int, bytes_per_state: int, num_bytes: int, max_num_rows: int, num_row_blocks: int
) -> None:
    model = spec(bytes_per_block, bytes_per_state)
    num_blocks, num_states = model.split_bytes(num_bytes, max_num_rows, num_row_blocks)
    num_rows = model.num_rows_with_states(num_states, max_num_rows)
    assert 1 <= num_rows <= max_num_rows
    assert num_states >= 1 + 2 * num_rows
    if num_blocks:
        assert model.num_cache_bytes(num_blocks, num_states) <= num_bytes
    if num_bytes >= model.num_bytes_for_rows(1, num_row_blocks):  # with a state to keep, and the longest request
        assert num_blocks >= num_row_blocks
        assert num_states >= 1 + 3 * num_rows
    if num_bytes >= model.num_bytes_for_rows(max_num_rows, num_row_blocks):
        assert num_rows == max_num_rows
    else:
        assert num_bytes < model.num_bytes_for_rows(num_rows + 1, num_row_blocks)


@example(num_bytes=1048634, more=1048525, bytes_per_state=1, num_row_blocks=1)
@given(
    num_bytes=st.integers(0, 1 << 36),
    more=st.integers(0, 1 << 30),
    bytes_per_state=st.integers(1, 200 * MIB),
    num_row_blocks=st.integers(1, 20_000),
)
def test_more_bytes_never_let_fewer_rows_run(
    num_bytes: int, more: int, bytes_per_state: int, num_row_blocks: int
) -> None:
    model = spec(MIB, bytes_per_state)
    states = [model.split_bytes(size, 256, num_row_blocks)[1] for size in (num_bytes, num_bytes + more)]
    rows = [model.num_rows_with_states(number, 256) for number in states]
    assert rows[0] <= rows[1]


def test_a_model_with_large_states_runs_some_of_its_rows() -> None:
    """States of 150 MiB, keys and values of 1 MiB for 16 tokens, 4 GiB, and requests of 2,048 tokens."""
    model = spec(MIB, 150 * MIB)
    num_blocks, num_states = model.split_bytes(4096 * MIB, 256, 128)
    assert (num_blocks, num_states, model.num_rows_with_states(num_states, 256)) == (1246, 19, 6)


def test_a_model_with_small_states_keeps_an_eighth_of_the_bytes_of_keys_and_values() -> None:
    model = spec(96 * 1024, 200 * 1024)
    num_blocks, num_states = model.split_bytes(1 << 32, 256, 128)
    assert model.num_rows_with_states(num_states, 256) == 256
    kept_bytes = (num_states - 1 - 2 * 256) * model.bytes_per_state
    assert kept_bytes / (num_blocks * model.bytes_per_block) > 0.1


def test_large_states_get_half_of_the_bytes_that_rows_leave() -> None:
    """States of 147 MiB, keys and values of 1 MiB for 16 tokens, 48 GiB, and 8 requests of 32,768 tokens."""
    model = spec(MIB, 147 * MIB)
    num_blocks, num_states = model.split_bytes(48 * 1024 * MIB, 8, 2048)
    assert 0.45 < num_states * model.bytes_per_state / (48 * 1024 * MIB) < 0.55
    assert model.num_useful_states(num_blocks, 8) >= num_blocks // 147


def test_a_model_without_states_has_keys_and_values_alone() -> None:
    model = spec(100, 0)
    assert model.split_bytes(1050, 256, 4) == (10, 0)
    assert model.num_useful_states(10, 256) == 0
    assert model.num_rows_with_states(0, 256) == 256


def test_less_than_the_states_of_a_row_lets_none_run() -> None:
    model = spec(100, 10)
    assert [model.num_rows_with_states(number, 9) for number in range(8)] == [0, 0, 0, 1, 1, 1, 1, 2]
    assert model.split_bytes(29, 9, 4) == (0, LEAST_STATE_BLOCKS)
