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


def make_slots(dtype: torch.dtype, device: str, num_inputs: int = IN_FEATURES) -> LowRankSlots:
    generator = torch.Generator().manual_seed(0)

    def pair(rank: int, first: int, count: int) -> LowRankFactors:
        a = torch.randn(rank, num_inputs, generator=generator) * num_inputs**-0.5
        b = torch.randn(rank, count, generator=generator)
        return LowRankFactors(a.to(device, dtype), b.to(device, dtype), first)

    slots = LowRankSlots(3, 2, 32, 20, torch.device(device))
    for slot, rank in enumerate((4, 16, 20)):
        slots.put(slot, LowRankAdapter([[], [pair(rank, 0, 37), pair(3, 53, 37)]]))
    return slots


def make_rows(dtype: torch.dtype, device: str, num_inputs: int = IN_FEATURES) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(len(ROW_SLOTS), size, generator=generator) for size in (num_inputs + 2, OUT_FEATURES))
    return x.to(device, dtype)[:, :num_inputs], y.to(device, dtype)


@pytest.mark.parametrize("num_inputs", [IN_FEATURES, 2100])  # one program, and three
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_each_row_gets_the_update_of_its_slot(dtype: torch.dtype, num_inputs: int, triton_device: str) -> None:
    slots = make_slots(dtype, triton_device, num_inputs)
    x, y = make_rows(dtype, triton_device, num_inputs)
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


def test_a_row_is_bit_equal_where_rows_are_too_many_for_a_program_each_split(
    triton_device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots = make_slots(torch.float32, triton_device, 2100)
    x, y = make_rows(torch.float32, triton_device, 2100)
    found = []
    for most in (len(x), len(x) - 1):
        monkeypatch.setattr(kernels, "_MAX_SPLIT_ROWS", most)
        slots.group(np.array(ROW_SLOTS))
        found.append(y.clone())
        with fixed_order_of_sums():
            kernels.add_low_rank_(found[-1], x, slots, 1)
    assert torch.equal(*found)


def test_an_embedding_gets_the_update_of_its_ids(triton_device: str) -> None:
    slots = make_slots(torch.float32, triton_device)
    _, y = make_rows(torch.float32, triton_device)
    ids = torch.tensor([0, 3, 71, 5, 5, 70, 1, 0, 9, 71], device=triton_device)
    slots.group(np.array(ROW_SLOTS))
    out, expected = y.clone(), y.clone()
    kernels.add_low_rank_to_embedding_(out, ids, slots, 1, IN_FEATURES)
    reference.add_low_rank_to_embedding_(expected, ids, slots, 1, IN_FEATURES)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    assert not torch.equal(expected, y)


def test_tiles_that_are_started_in_vain_change_nothing(triton_device: str) -> None:
    slots = make_slots(torch.float32, triton_device)
    x, y = make_rows(torch.float32, triton_device)
    ids = torch.arange(len(ROW_SLOTS), device=triton_device)
    slots.group(np.array(ROW_SLOTS)[::-1].copy())  # leaves more tiles in memory than the next order has
    slots.group(np.array([-1, -1, 1, *[-1] * 7]))
    exact, captured = y.clone(), y.clone()
    for out in (exact, captured):
        slots.num_fixed_rows = len(ROW_SLOTS) if out is captured else 0
        kernels.add_low_rank_(out, x, slots, 1)
        kernels.add_low_rank_to_embedding_(out, ids, slots, 1, IN_FEATURES)
    assert torch.equal(captured, exact)
    assert not torch.equal(exact[2], y[2])
    assert torch.equal(exact[:2], y[:2])
