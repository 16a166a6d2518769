"""The Triton embedding is bit-equal to the reference."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed (extra `triton`)")

from llmstack_kernels import reference
from llmstack_kernels.embedding import triton as kernels


@pytest.mark.parametrize("size", [1, 48, 1030])
@pytest.mark.parametrize("scale", [1.0, 2.5])
@pytest.mark.parametrize("has_addend", [True, False])
def test_rows_are_looked_up_scaled_and_added(
    size: int, scale: float, has_addend: bool, triton_dtype: torch.dtype, triton_device: str
) -> None:
    table = torch.randn(11, size, device=triton_device).to(triton_dtype)
    ids = torch.tensor([3, 10, 0, 3, 7], device=triton_device)
    addend = torch.randn(5, size, device=triton_device).to(triton_dtype) if has_addend else None
    out = kernels.embedding(ids, table, addend, scale)
    assert out.dtype == triton_dtype
    assert torch.equal(out, reference.embedding(ids, table, addend, scale))


def test_the_sum_with_an_addend_of_a_wider_type_is_wide(triton_device: str) -> None:
    table = torch.randn(4, 20, device=triton_device).half()
    ids, addend = torch.tensor([2, 1], device=triton_device), torch.randn(2, 20, device=triton_device)
    assert torch.equal(kernels.embedding(ids, table, addend, 1.0), table[ids] + addend)


def test_no_ids_give_no_rows(triton_device: str) -> None:
    ids = torch.empty(0, dtype=torch.int64, device=triton_device)
    assert kernels.embedding(ids, torch.zeros(3, 8, device=triton_device), None, 1.0).shape == (0, 8)
