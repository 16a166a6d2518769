"""Attention over latents, whose first numbers are the values: against float64, and bits in any batch and cut."""

from __future__ import annotations

import pytest
import torch
from kernel_helpers.latent_cases import TOLERANCES, exact, make_inputs

from llmstack_kernels.native import library
from llmstack_kernels.paged_attention import cpu, paged_attention, reference
from llmstack_kernels.paged_attention import native as native_kernels

SIZES = {"DeepSeek's": (576, 512), "small": (48, 32), "narrow": (96, 16)}
needs_native = pytest.mark.skipif(library() is None, reason="the native kernels are not built")


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("num_heads", [1, 5, 16, 128])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_decodes_and_prompts_agree_with_float64(sizes: tuple[int, int], num_heads: int, dtype: torch.dtype) -> None:
    inputs = make_inputs([(1, 1), (1, 150), (7, 70), (20, 20)], num_heads, sizes, dtype)
    expected, tolerance = exact(inputs), TOLERANCES[dtype]
    for compute in (paged_attention, reference.paged_attention, cpu.paged_attention):
        out = compute(inputs)
        assert (out.shape, out.dtype) == (expected.shape, dtype)
        torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_heads", [3, 16, 40])
@pytest.mark.parametrize("block_size", [1, 8, 16])
def test_bits_do_not_depend_on_the_batch_the_cut_and_the_threads(
    block_size: int, num_heads: int, dtype: torch.dtype
) -> None:
    whole = make_inputs([(90, 150), (1, 70)], num_heads, SIZES["small"], dtype, block_size)
    expected = native_kernels.paged_attention(whole)
    for cuts in ([1] * 90, [7] * 12 + [6], [23, 67]):
        start = 0
        for length in cuts:
            part = whole._replace(
                query=whole.query[start : start + length],
                query_start_loc=torch.tensor([0, length], dtype=torch.int32),
                seq_lens=torch.tensor([60 + start + length], dtype=torch.int32),
                block_tables=whole.block_tables[:1],
                query_start_loc_list=[0, length],
                seq_lens_list=[60 + start + length],
            )
            out = native_kernels.paged_attention(part)
            assert torch.equal(out, expected[start : start + length]), (cuts[0], start)
            start += length
    num_threads = torch.get_num_threads()
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            assert torch.equal(native_kernels.paged_attention(whole), expected)
    finally:
        torch.set_num_threads(num_threads)


def test_latents_are_written_once() -> None:
    from llmstack_kernels.reshape_and_cache import reshape_and_cache

    cache, slots = torch.full((3, 1, 4, 16), torch.nan), torch.tensor([4, 5, -1, 8])
    latents = torch.randn(4, 1, 16)
    reshape_and_cache(latents, None, cache, None, slots)
    assert torch.equal(cache[1, 0, :2], latents[:2, 0])
    assert torch.equal(cache[2, 0, 0], latents[3, 0])
    assert not cache[1, 0, 2:].any()  # cleared with the block's first slot
    assert cache[0].isnan().all()
    with pytest.raises(ValueError, match="go together"):
        reshape_and_cache(latents, latents, cache, None, slots)


def test_values_are_at_most_as_wide_as_keys() -> None:
    inputs = make_inputs([(1, 20)], 2, SIZES["small"], torch.float32)
    wide = inputs._replace(value_cache=torch.zeros(*inputs.key_cache.shape[:3], 64))
    with pytest.raises(ValueError, match="does not fit caches"):
        paged_attention(wide)
