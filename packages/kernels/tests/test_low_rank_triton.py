"""Low-rank updates on a GPU: the definition's values, and bits that depend on no other row."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed (extra `triton`)")

from llmstack_kernels.low_rank import LowRankAdapter, LowRankFactors, LowRankSlots, reference
from llmstack_kernels.low_rank import triton as kernels
from llmstack_kernels.testing import fixed_order_of_sums

# What Triton's own interpreter does to the bounds of a loop.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")

TOLERANCES = {torch.float32: 1e-5, torch.float16: 4e-3}
IN_FEATURES, OUT_FEATURES = 72, 90
ROW_SLOTS = [0, 2, -1, 1, 1, 0, 2, 2, -1, 0]


def make_slots(dtype: torch.dtype, device: str) -> LowRankSlots:
    generator = torch.Generator().manual_seed(0)

    def pair(rank: int, first: int, count: int) -> LowRankFactors:
        a = torch.randn(rank, IN_FEATURES, generator=generator) * IN_FEATURES**-0.5
        b = torch.randn(rank, count, generator=generator)
        return LowRankFactors(a.to(device, dtype), b.to(device, dtype), first)

    slots = LowRankSlots(3, 2, 32, 20, torch.device(device))
    for slot, rank in enumerate((4, 16, 20)):
        slots.put(slot, LowRankAdapter([[], [pair(rank, 0, 37), pair(3, 53, 37)]]))
    return slots


def make_rows(dtype: torch.dtype, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(len(ROW_SLOTS), size, generator=generator) for size in (IN_FEATURES + 2, OUT_FEATURES))
    return x.to(device, dtype)[:, :IN_FEATURES], y.to(device, dtype)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_each_row_gets_the_update_of_its_slot(dtype: torch.dtype, triton_device: str) -> None:
    slots = make_slots(dtype, triton_device)
    x, y = make_rows(dtype, triton_device)
    slots.group(np.array(ROW_SLOTS))
    for out_dtype in {dtype, torch.float32}:
        out, expected = y.to(out_dtype, copy=True), y.to(out_dtype, copy=True)
        kernels.add_low_rank_(out, x, slots, 1)
        reference.add_low_rank_(expected, x, slots, 1)
        torch.testing.assert_close(out, expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])
        assert torch.equal(out[[2, 8]], y[[2, 8]].to(out_dtype))
        kernels.add_low_rank_(out, x, slots, 0)
        torch.testing.assert_close(out, expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


def test_a_row_is_bit_equal_alone_and_in_any_batch(triton_device: str) -> None:
    slots = make_slots(torch.float32, triton_device)
    x, y = make_rows(torch.float32, triton_device)
    with fixed_order_of_sums():
        slots.group(np.array(ROW_SLOTS))
        whole = y.clone()
        kernels.add_low_rank_(whole, x, slots, 1)
        for row in (1, 4):
            slots.group(np.array(ROW_SLOTS[row : row + 1]))
            alone = y[row : row + 1].clone()
            kernels.add_low_rank_(alone, x[row : row + 1], slots, 1)
            assert torch.equal(alone[0], whole[row])
