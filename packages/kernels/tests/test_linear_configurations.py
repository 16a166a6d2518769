"""How linear layers are cut: no part is empty, every tile fits, and the number of rows decides no bits."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmstack_kernels.linear.configurations import CHUNK_SIZES, FORMATS, candidates, choose, choose_tile

SHARED_BYTES = 163 * 1024  # a block's share at compute capability 8.0, the smaller of the two
sizes = st.integers(1, 40_000)


@given(
    weight_format=st.sampled_from(FORMATS), out_features=sizes, in_features=sizes, row_bits=st.sampled_from([16, 32])
)
def test_every_part_of_the_inputs_has_some(
    weight_format: str, out_features: int, in_features: int, row_bits: int
) -> None:
    cut = choose(weight_format, out_features, in_features, row_bits)
    num_chunks = -(-in_features // cut.block_k)
    chunks_per_part = -(-num_chunks // cut.split_k)
    assert (cut.split_k - 1) * chunks_per_part < num_chunks <= cut.split_k * chunks_per_part


@given(weight_format=st.sampled_from(FORMATS), out_features=sizes, in_features=sizes, num_rows=st.integers(1, 5000))
def test_tiles_fit_into_shared_memory_whatever_the_number_of_rows(
    weight_format: str, out_features: int, in_features: int, num_rows: int
) -> None:
    for cut in candidates(weight_format, out_features, in_features):
        tile = choose_tile(cut, weight_format, num_rows)
        weight_bits = {"plain": 16, "int4": 4}.get(weight_format, 8)
        stage_bytes = cut.block_k * (tile.block_out * weight_bits + tile.block_rows * 16) // 8
        assert tile.num_stages >= 2
        assert tile.num_stages * stage_bytes <= SHARED_BYTES
        if num_rows <= 64:
            assert tile.block_rows >= num_rows  # the weight is read once


@pytest.mark.parametrize("weight_format", FORMATS)
def test_candidates_begin_with_the_chosen_cut_and_differ(weight_format: str) -> None:
    found = list(candidates(weight_format, 4096, 4096))
    assert found[0] == choose(weight_format, 4096, 4096)
    assert len(found) > 4
    assert found[0] not in found[1:]
    assert all(cut.block_k == CHUNK_SIZES.get(weight_format, cut.block_k) for cut in found)
