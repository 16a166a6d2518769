"""Sampling as it is compiled ahead of time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from llmstack_kernels.ahead_of_time.case import CompileCase
from llmstack_kernels.sample_tokens import triton as kernels
from llmstack_kernels.sample_tokens.state import NUM_WORDS, SamplingState

_NUM_PERSISTENT_ROWS = 256


def cases() -> Iterator[CompileCase]:
    """Vocabularies of GPT-2 and Llama 3, many rows and one, with what rows may ask for; the largest there are."""
    for name, vocab_size in (("gpt2", 50_257), ("llama", 128_256)):
        logits = _empty(torch.float32, 64, vocab_size)
        yield CompileCase(f"greedy_{name}", _call(logits, has_random=False))
        yield CompileCase(f"random_{name}", _call(logits), name == "llama")
        yield CompileCase(f"penalties_masked_{name}", _call(logits, has_penalties=True, is_masked=True))
        yield CompileCase(f"random_{name}_bf16_alone", _call(_empty(torch.bfloat16, 1, vocab_size)))
    for name, vocab_size in (("qwen", 151_936), ("gemma", 256_000)):
        logits = _empty(torch.float32, 64, vocab_size)
        yield CompileCase(f"penalties_{name}", _call(logits, has_penalties=True))
        yield CompileCase(f"penalties_masked_{name}", _call(logits, has_penalties=True, is_masked=True))


def _call(
    logits: torch.Tensor, has_random: bool = True, has_penalties: bool = False, is_masked: bool = False
) -> Callable[[], object]:
    num_rows, vocab_size = logits.shape
    state = SamplingState(
        _empty(torch.int64, _NUM_PERSISTENT_ROWS, NUM_WORDS),
        _empty(torch.int64, _NUM_PERSISTENT_ROWS),
        _empty(torch.int32, _NUM_PERSISTENT_ROWS, vocab_size) if has_penalties else None,
    )
    bitmask = _empty(torch.int32, num_rows, -(-vocab_size // 32)) if is_masked else None
    rows = _empty(torch.int32, num_rows)
    return partial(kernels.sample_tokens, logits, rows, state, bitmask, has_random, has_penalties, True)


def _empty(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
