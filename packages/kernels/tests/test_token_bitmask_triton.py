"""The Triton bitmask masks the tokens whose bits are 0, and no others."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed (extra `triton`)")

from llmstack_kernels import reference
from llmstack_kernels.token_bitmask import triton as kernels


def random_bits(num_rows: int, vocab_size: int, device: str) -> torch.Tensor:
    words = torch.randint(-(2**31), 2**31, (num_rows, -(-vocab_size // 32)), dtype=torch.int64)
    return words.to(torch.int32).to(device)


@pytest.mark.parametrize("vocab_size", [1, 32, 33, 97, 4096, 5000])
def test_tokens_are_masked_as_by_the_reference(vocab_size: int, triton_dtype: torch.dtype, triton_device: str) -> None:
    logits = torch.randn(5, vocab_size, device=triton_device).to(triton_dtype)
    rows, bits = torch.tensor([4, 1, 2], device=triton_device), random_bits(3, vocab_size, triton_device)
    expected = logits.clone()
    reference.apply_token_bitmask(expected, rows, bits)
    kernels.apply_token_bitmask(logits, rows, bits)
    assert torch.equal(logits, expected)


def test_rows_may_lie_apart_or_across(triton_device: str) -> None:
    rows, bits = torch.tensor([1], device=triton_device), torch.zeros(1, 2, dtype=torch.int32, device=triton_device)
    apart = torch.zeros(3, 64, device=triton_device)
    kernels.apply_token_bitmask(apart[:, 10:50], rows, bits)
    assert (apart == -torch.inf).nonzero().tolist() == [[1, column] for column in range(10, 50)]
    across = torch.zeros(40, 3, device=triton_device)
    kernels.apply_token_bitmask(across.t(), rows, bits)
    assert int((across == -torch.inf).sum()) == 40
