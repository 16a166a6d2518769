"""Sampling as it is compiled ahead of time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from llmstack_kernels.ahead_of_time.case import CompileCase
from llmstack_kernels.sample_tokens import triton as kernels
from llmstack_kernels.sample_tokens.state import NUM_WORDS, SamplingState

_NUM_ROWS = 64


def cases() -> Iterator[CompileCase]:
    """Vocabularies of GPT-2 and Llama 3, logits of either width, with what rows may ask for."""
    for name, vocab_size in (("gpt2", 50_257), ("llama", 128_256)):
        yield CompileCase(f"greedy_{name}", _call(vocab_size, torch.float32, has_random=False))
        yield CompileCase(f"random_{name}", _call(vocab_size, torch.float32), name == "llama")
        yield CompileCase(f"random_{name}_bf16", _call(vocab_size, torch.bfloat16))
        yield CompileCase(f"penalties_{name}", _call(vocab_size, torch.float32, has_penalties=True))
        yield CompileCase(
            f"penalties_masked_{name}", _call(vocab_size, torch.float32, has_penalties=True, is_masked=True)
        )


def _call(
    vocab_size: int,
    dtype: torch.dtype,
    has_random: bool = True,
    has_penalties: bool = False,
    is_masked: bool = False,
) -> Callable[[], object]:
    state = SamplingState(
        _empty(torch.int64, 4 * _NUM_ROWS, NUM_WORDS),
        _empty(torch.int64, 4 * _NUM_ROWS),
        _empty(torch.int32, 4 * _NUM_ROWS, vocab_size) if has_penalties else None,
    )
    bitmask = _empty(torch.int32, _NUM_ROWS, -(-vocab_size // 32)) if is_masked else None
    logits, rows = _empty(dtype, _NUM_ROWS, vocab_size), _empty(torch.int32, _NUM_ROWS)
    return partial(kernels.sample_tokens, logits, rows, state, bitmask, has_random, has_penalties, True)


def _empty(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
