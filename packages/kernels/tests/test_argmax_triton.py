"""Argmax in Triton: lowest index of ties, NaN first, any number of parts."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed (extra `triton`)")

from llmstack_kernels.argmax import triton as kernels

SIZES = [1, 17, 4096, 4097, 20000]


@pytest.mark.parametrize("size", SIZES)
def test_the_largest_value_is_found_in_each_row(size: int, triton_dtype: torch.dtype, triton_device: str) -> None:
    values = torch.randn(3, size, device=triton_device).to(triton_dtype)
    best, indices = kernels.argmax(values)
    assert best.dtype == triton_dtype
    assert torch.equal(best, values.amax(dim=-1))
    is_best = values == best[:, None]
    assert torch.equal(indices, is_best.to(torch.int8).argmax(dim=-1))
    first = torch.arange(size, device=triton_device).expand(3, -1).masked_fill(~is_best, size).amin(dim=-1)
    assert torch.equal(indices, first)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("value", [0.0, -torch.inf, torch.inf, -3.5])
def test_of_equal_values_the_first_one_counts(size: int, value: float, triton_device: str) -> None:
    values = torch.full((2, size), value, device=triton_device)
    values[1, : size // 2] = -torch.inf
    best, indices = kernels.argmax(values)
    assert indices.tolist() == [0, 0 if value == -torch.inf else size // 2]
    assert best.tolist() == [value, value]


def test_both_zeros_are_equal(triton_device: str) -> None:
    values = torch.tensor([[-1.0, -0.0, 0.0], [-1.0, 0.0, -0.0]], device=triton_device)
    assert kernels.argmax(values)[1].tolist() == [1, 1]


@pytest.mark.parametrize("place", [0, 300, 4999])
@pytest.mark.parametrize("sign", [1, -1])
def test_what_is_no_number_is_found_before_anything_else(place: int, sign: int, triton_device: str) -> None:
    values = torch.randn(3, 5000, device=triton_device)
    values[1, 17] = torch.inf
    values[1, place:] = sign * torch.nan
    best, indices = kernels.argmax(values)
    assert indices[1] == place
    assert best.isnan().tolist() == [False, True, False]


def test_rows_may_be_slices_and_there_may_be_none(triton_device: str) -> None:
    whole = torch.randn(4, 60, device=triton_device)
    part = whole[1:3, 5:50]
    assert torch.equal(kernels.argmax(part)[1], part.argmax(dim=-1))
    assert torch.equal(kernels.argmax(whole.t())[1], whole.argmax(dim=0))
    assert [len(found) for found in kernels.argmax(whole[:0])] == [0, 0]
