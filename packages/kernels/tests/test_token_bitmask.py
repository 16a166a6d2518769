"""Token bitmasks, native against reference and against a loop."""

from __future__ import annotations

import pytest
import torch

from llmstack_kernels import reference
from llmstack_kernels.token_bitmask import apply_token_bitmask

VOCAB_SIZES = [1, 31, 32, 33, 257, 50_257]


def random_bits(num_rows: int, vocab_size: int) -> torch.Tensor:
    """Words of every kind: nothing allowed, everything, some; what lies behind the vocabulary is set at random."""
    words = torch.randint(-(2**31), 2**31, (num_rows, -(-vocab_size // 32)), dtype=torch.int64).to(torch.int32)
    kind = torch.randint(0, 3, words.shape)
    return torch.where(kind == 0, 0, torch.where(kind == 1, -1, words)).to(torch.int32)


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
@pytest.mark.parametrize("rows", [[0, 1, 2, 3], [3, 1], [2], []])
def test_only_what_is_masked_changes(vocab_size: int, rows: list[int]) -> None:
    bits = random_bits(len(rows), vocab_size)
    before = torch.randn(4, vocab_size)
    logits = before.clone()
    apply_token_bitmask(logits, torch.tensor(rows, dtype=torch.int64), bits)
    expected = before.clone()
    for row, words in zip(rows, bits.tolist(), strict=True):
        for token_id in range(vocab_size):
            if not words[token_id // 32] >> token_id % 32 & 1:
                expected[row, token_id] = -torch.inf
    assert torch.equal(logits, expected)


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_the_reference_says_the_same(vocab_size: int) -> None:
    bits, rows = random_bits(3, vocab_size), torch.tensor([4, 0, 2])
    logits = torch.randn(5, vocab_size)
    other = logits.clone()
    apply_token_bitmask(logits, rows, bits)
    reference.apply_token_bitmask(other, rows, bits)
    assert torch.equal(logits, other)


def test_other_types_are_masked_too() -> None:
    logits = torch.zeros(2, 40, dtype=torch.bfloat16)
    apply_token_bitmask(logits, torch.tensor([1]), torch.tensor([[1, 0]], dtype=torch.int32))
    assert torch.isfinite(logits).sum(dim=-1).tolist() == [40, 1]


@pytest.mark.parametrize("bits", [torch.zeros(1, 1, dtype=torch.int32), torch.zeros(1, 2), torch.zeros(2, 2)])
def test_bits_of_another_shape_or_type_are_refused(bits: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="token bitmask"):
        apply_token_bitmask(torch.zeros(3, 33), torch.tensor([0]), bits)
