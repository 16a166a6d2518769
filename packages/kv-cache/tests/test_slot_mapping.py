"""A slot is block_id * block_size + offset."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")


@given(
    block_size=st.integers(1, 64),
    tables=st.lists(st.lists(st.integers(0, 10_000), min_size=1, max_size=4), min_size=1, max_size=4),
    data=st.data(),
)
def test_every_token_lies_in_the_block_its_table_names(block_size, tables, data):
    from llmstack_kv_cache.slot_mapping import compute_slot_mapping

    tokens = data.draw(
        st.lists(
            st.integers(0, len(tables) - 1).flatmap(
                lambda row: st.tuples(st.just(row), st.integers(0, len(tables[row]) * block_size - 1))
            ),
            max_size=20,
        )
    )
    padded = torch.tensor([table + [0] * (4 - len(table)) for table in tables], dtype=torch.int32)
    rows = torch.tensor([row for row, _ in tokens], dtype=torch.int32)
    positions = torch.tensor([position for _, position in tokens], dtype=torch.int32)
    slots = compute_slot_mapping(padded, rows, positions, block_size)
    assert slots.dtype is torch.int64
    expected = [tables[row][position // block_size] * block_size + position % block_size for row, position in tokens]
    assert slots.tolist() == expected
