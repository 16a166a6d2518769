"""Token bitmasks: logits become minus infinity where a bit is 0."""

from __future__ import annotations

import torch

from llmstack_kernels.dispatch import implementation

WORD_BITS = 32


def apply_token_bitmask(logits: torch.Tensor, rows: torch.Tensor, bits: torch.Tensor) -> None:
    """Sets the tokens of some rows whose bit is 0 to minus infinity, in place.

    Args:
        logits: [num_rows, vocab_size]
        rows: Distinct rows of `logits`; the others stay as they are. int64 [num_masked_rows]
        bits: Token t is bit t % 32, counted from the lowest, of word t // 32; bits beyond the vocabulary are ignored.
            int32 [num_masked_rows, ceil(vocab_size / 32)]

    Raises:
        ValueError: The bits are no int32 of the shape that the logits and the rows ask for.
    """
    expected = (len(rows), -(-logits.shape[-1] // WORD_BITS))
    if bits.dtype != torch.int32 or bits.shape != expected:
        raise ValueError(f"a token bitmask must be int32 {list(expected)}, but is {bits.dtype} {list(bits.shape)}")
    if len(rows):
        implementation("token_bitmask", logits.device.type).apply_token_bitmask(logits, rows, bits)
