"""The Triton KV write puts every number where it belongs, and none elsewhere."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed (extra `triton`)")

from llmstack_kernels import reference
from llmstack_kernels.float8_cache import STORED_TYPE
from llmstack_kernels.reshape_and_cache import triton as kernels

NUM_BLOCKS, BLOCK_SIZE = 5, 16
SLOTS = [2 * BLOCK_SIZE + 3, 4 * BLOCK_SIZE, -1, 15, -1, BLOCK_SIZE + 1]


def make_caches(num_heads: int, head_dim: int, dtype: torch.dtype, device: str) -> list[torch.Tensor]:
    """Keys and values, full of NaN, in one storage as the runner lays them out."""
    shape = (NUM_BLOCKS, 2, num_heads, BLOCK_SIZE, head_dim)
    return list(torch.full(shape, torch.nan, device=device).to(dtype).unbind(1))


@pytest.mark.parametrize(("num_heads", "head_dim"), [(1, 64), (12, 40), (8, 128), (3, 256)])
def test_tokens_go_to_their_slots_and_nothing_else_is_written(
    num_heads: int, head_dim: int, triton_dtype: torch.dtype, triton_device: str
) -> None:
    projection = torch.randn(len(SLOTS), 3 * num_heads, head_dim, device=triton_device).to(triton_dtype)
    _, key, value = projection.split(num_heads, 1)
    caches = make_caches(num_heads, head_dim, triton_dtype, triton_device)
    kernels.reshape_and_cache(key, value, *caches, torch.tensor(SLOTS, device=triton_device))
    for cache, heads in zip(caches, (key, value), strict=True):
        expected = make_caches(num_heads, head_dim, triton_dtype, triton_device)[0]
        for token, slot in enumerate(SLOTS):
            if slot >= 0:
                expected[slot // BLOCK_SIZE, :, slot % BLOCK_SIZE] = heads[token]
        assert torch.equal(cache.nan_to_num(-1e4), expected.nan_to_num(-1e4))


def test_heads_and_dimensions_may_lie_apart(triton_device: str) -> None:
    wide = torch.randn(2, 8, 4, 32, device=triton_device)
    key, value = wide[0].mT[:, ::2], wide[1, :, ::2].mT.contiguous().mT  # [8, 16, 4], [8, 2, 32]
    slots = torch.arange(8, device=triton_device)
    for heads in (key, value):
        caches = make_caches(heads.shape[1], heads.shape[2], torch.float32, triton_device)
        kernels.reshape_and_cache(heads, heads, *caches, slots)
        assert torch.equal(caches[0][0, :, :8].transpose(0, 1), heads)
        assert torch.equal(caches[1][0, :, :8].transpose(0, 1), heads)


@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.float16], ids=str)
def test_the_caches_may_hold_another_type(cache_dtype: torch.dtype, triton_device: str) -> None:
    key, value = torch.randn(2, len(SLOTS), 2, 32, device=triton_device)
    caches = make_caches(2, 32, cache_dtype, triton_device)
    kernels.reshape_and_cache(key, value, *caches, torch.tensor(SLOTS, device=triton_device))
    assert torch.equal(caches[0][2, :, 3], key[0].to(cache_dtype))
    assert torch.equal(caches[1][4, :, 0], value[1].to(cache_dtype))


# Where numbers fall between two of 8 bits, the interpreter rounds some of them to neither.
@pytest.mark.parametrize("is_rounded", [False, pytest.param(True, marks=pytest.mark.gpu)], ids=["exact", "rounded"])
def test_eight_bits_hold_what_the_reference_stores(is_rounded: bool, triton_device: str) -> None:
    scales = [torch.tensor(values, device=triton_device) for values in ([0.125, 0.5, 4.0], [0.25, 1.0, 0.0625])]
    heads = torch.randn(2, len(SLOTS), 3, 64, device=triton_device)
    if not is_rounded:
        heads = heads.to(STORED_TYPE).float() * torch.stack(scales)[:, None, :, None]
    key, value = heads
    key[0, 0, :2] = torch.tensor([1e6, -1e6])
    slots = torch.tensor(SLOTS, device=triton_device)
    stored, expected = (make_caches(3, 64, STORED_TYPE, triton_device) for _ in range(2))
    kernels.reshape_and_cache(key, value, *stored, slots, *scales)
    reference.reshape_and_cache(key, value, *expected, slots, *scales)
    for cache, right in zip(stored, expected, strict=True):
        for slot in filter(lambda slot: slot >= 0, SLOTS):
            place = slot // BLOCK_SIZE, slice(None), slot % BLOCK_SIZE
            assert torch.equal(cache[place].float(), right[place].float())
    assert stored[0][2, 0, 3, :2].tolist() == [448.0, -448.0]
    assert stored[0][3].float().isnan().all()


def test_blocks_that_are_not_contiguous_are_refused(triton_device: str) -> None:
    key = torch.randn(1, 2, 16, device=triton_device)
    cache = torch.zeros(2, 16, 2, 16, device=triton_device).transpose(1, 2)
    with pytest.raises(ValueError, match="contiguous"):
        kernels.reshape_and_cache(key, key, cache, cache, torch.tensor([1], device=triton_device))
