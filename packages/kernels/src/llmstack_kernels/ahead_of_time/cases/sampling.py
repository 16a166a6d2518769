"""Compile cases of sampling and of the inputs of decode steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from llmstack_kernels.ahead_of_time.case import CompileCase, meta_tensor
from llmstack_kernels.argmax import triton as argmax
from llmstack_kernels.decode_inputs import DecodeInputs
from llmstack_kernels.decode_inputs import triton as decode_inputs
from llmstack_kernels.sample_tokens import triton as sample_tokens
from llmstack_kernels.sample_tokens.state import NUM_WORDS, SamplingState
from llmstack_kernels.token_bitmask import triton as token_bitmask


def _argmax_cases() -> Iterator[CompileCase]:
    """The vocabularies of GPT-2 and Llama 3."""
    for name, size in (("gpt2", 50257), ("llama3", 128_256)):
        logits = torch.empty((64, size), device="meta")
        yield CompileCase(f"{name}_f32", partial(argmax.argmax, logits), is_sample=name == "llama3")


_NUM_PERSISTENT_ROWS = 256


def _sample_tokens_cases() -> Iterator[CompileCase]:
    """Vocabularies of GPT-2 and Llama 3, many rows and one, with what rows may ask for; the largest there are."""
    for name, vocab_size in (("gpt2", 50_257), ("llama", 128_256)):
        logits = meta_tensor(64, vocab_size, dtype=torch.float32)
        yield CompileCase(f"greedy_{name}", _call(logits, has_random=False))
        yield CompileCase(f"random_{name}", _call(logits), name == "llama")
        yield CompileCase(f"penalties_masked_{name}", _call(logits, has_penalties=True, is_masked=True))
        yield CompileCase(f"random_{name}_bf16_alone", _call(meta_tensor(1, vocab_size, dtype=torch.bfloat16)))
    for name, vocab_size in (("qwen", 151_936), ("gemma", 256_000)):
        logits = meta_tensor(64, vocab_size, dtype=torch.float32)
        yield CompileCase(f"penalties_{name}", _call(logits, has_penalties=True))
        yield CompileCase(f"penalties_masked_{name}", _call(logits, has_penalties=True, is_masked=True))


def _call(
    logits: torch.Tensor, has_random: bool = True, has_penalties: bool = False, is_masked: bool = False
) -> Callable[[], object]:
    num_rows, vocab_size = logits.shape
    state = SamplingState(
        meta_tensor(_NUM_PERSISTENT_ROWS, NUM_WORDS, dtype=torch.int64),
        meta_tensor(_NUM_PERSISTENT_ROWS, dtype=torch.int64),
        meta_tensor(_NUM_PERSISTENT_ROWS, vocab_size, dtype=torch.int32) if has_penalties else None,
    )
    bitmask = meta_tensor(num_rows, -(-vocab_size // 32), dtype=torch.int32) if is_masked else None
    rows = meta_tensor(num_rows, dtype=torch.int32)
    return partial(sample_tokens.sample_tokens, logits, rows, state, bitmask, has_random, has_penalties, True)


def _token_bitmask_cases() -> Iterator[CompileCase]:
    """The vocabularies of GPT-2 and Llama 3."""
    for name, size in (("gpt2", 50257), ("llama3", 128_256)):
        logits, rows = torch.empty((64, size), device="meta"), torch.empty(8, dtype=torch.int64, device="meta")
        bits = torch.empty((8, -(-size // 32)), dtype=torch.int32, device="meta")
        call = partial(token_bitmask.apply_token_bitmask, logits, rows, bits)
        yield CompileCase(f"{name}_f32", call, is_sample=name == "llama3")


def _decode_inputs_cases() -> Iterator[CompileCase]:
    """256 rows of 8,192 tokens in blocks of 16."""
    num_rows, num_blocks, block_size = 256, 512, 16
    state, rows = meta_tensor(num_rows + 1, 2 + num_blocks, dtype=torch.int32), meta_tensor(num_rows, dtype=torch.int32)
    wide = torch.empty(num_rows, dtype=torch.int64, device="meta")
    out = DecodeInputs(wide, wide, rows, wide, meta_tensor(num_rows, num_blocks, dtype=torch.int32))
    is_good = torch.empty(num_rows, dtype=torch.bool, device="meta")
    yield CompileCase("decode", partial(decode_inputs.decode_inputs, state, rows, block_size, out), is_sample=True)
    drafts = meta_tensor(num_rows, 2, dtype=torch.int32)
    yield CompileCase("decode_drafts", partial(decode_inputs.decode_inputs, state, rows, block_size, out, drafts))
    keep = partial(decode_inputs.keep_drafts, state, rows, drafts, wide, is_good, wide)
    yield CompileCase("keep_drafts", keep, is_sample=True)
    yield CompileCase("advance", partial(decode_inputs.advance_rows, state, rows, wide, is_good, rows), is_sample=True)
    yield CompileCase(
        "update", partial(decode_inputs.update_rows, state, meta_tensor(1000, 3, dtype=torch.int32)), is_sample=True
    )


CASES: dict[str, Callable[[], Iterator[CompileCase]]] = {
    "argmax": _argmax_cases,
    "decode_inputs": _decode_inputs_cases,
    "sample_tokens": _sample_tokens_cases,
    "token_bitmask": _token_bitmask_cases,
}
