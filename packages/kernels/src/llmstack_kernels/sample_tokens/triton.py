"""Sampling on a GPU: one reading of the logits, and a second one of little of them, without sorting a row.

A first kernel reads all logits and writes the maximum of each block of them, and its weight where a row is random. A
second one, a program per row, has all it needs for the first maximum and for a draw from the whole vocabulary but one
block. A top-k set, a nucleus or what min-p keeps lies in the blocks whose maxima are among the largest; these it reads
again. Rows whose set turns out to be larger than the candidates are left to a third kernel, which reads them several
times; it finds nothing to do in nearly all steps.

No program reads more than one row, and tiles are of sizes that the vocabulary decides: a row's token is the same in any
batch. Scratch memory is what `torch.empty` gives: 1 to 2 % of the logits, and 8 KB a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from llmstack_kernels.launch import describe, is_available, launch
from llmstack_kernels.sample_tokens.state import SamplingState
from llmstack_kernels.sample_tokens.triton_choice import block_kernel, choice_kernel
from llmstack_kernels.sample_tokens.triton_search import search_kernel

__all__ = ["describe", "is_available", "sample_tokens"]

_NUM_CANDIDATES = 512
"""Twice the largest set that is inverted by rank: a bound taken from maxima of blocks lets some more tokens pass."""
_GATHER_TILE = 2048
_SEARCH_TILE = 2048
_TILE = 2048
"""Logits a program of the first kernel reads: with 16 of them a thread's loads hide each other's latency."""


@dataclass(frozen=True, slots=True)
class _Blocks:
    """How a row is divided; by the vocabulary alone."""

    block: int
    num_blocks: int

    @staticmethod
    def of(vocab_size: int) -> _Blocks:
        # About a thousand maxima fit into the registers of a program, and are four for each candidate wanted.
        block = min(256, max(1, triton.next_power_of_2(vocab_size) // 1024))
        return _Blocks(block, -(-vocab_size // block))


def sample_tokens(
    logits: torch.Tensor,
    rows: torch.Tensor,
    state: SamplingState,
    bitmask: torch.Tensor | None,
    has_random: bool,
    has_penalties: bool,
    is_counting: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Two kernels for greedy rows, three otherwise; nothing is read back."""
    num_rows, vocab_size = logits.shape
    blocks = _Blocks.of(vocab_size)
    maxima = logits.new_empty((num_rows, blocks.num_blocks), dtype=torch.float32)
    token_ids = logits.new_empty((num_rows,), dtype=torch.int64)
    is_good = logits.new_empty((num_rows,), dtype=torch.bool)
    bitmask = None if bitmask is None else bitmask.contiguous()
    inputs = (
        logits, logits.stride(0), rows, state.parameters, state.num_outputs,
        state.token_counts if has_penalties else None, bitmask, 0 if bitmask is None else bitmask.shape[1],
    )  # fmt: skip
    sums = torch.empty_like(maxima) if has_random else None
    tile_blocks = max(1, min(_TILE, triton.next_power_of_2(vocab_size)) // blocks.block)
    grid = (triton.cdiv(blocks.num_blocks, tile_blocks), num_rows)
    constants = {"HAS_RANDOM": has_random, "BLOCK": blocks.block, "TILE_BLOCKS": tile_blocks}
    launch(block_kernel, grid, *inputs, maxima, sums, vocab_size, blocks.num_blocks, num_warps=8, **constants)
    constants["TILE_BLOCKS"] = min(tile_blocks, max(1, _GATHER_TILE // blocks.block))
    scratch = _Scratch.of(maxima) if has_random else _Scratch()
    launch(
        choice_kernel, (num_rows,), *inputs, maxima, sums, scratch.blocks, scratch.candidates, scratch.candidate_ids,
        scratch.largest, scratch.totals, token_ids, is_good, vocab_size, blocks.num_blocks,
        num_warps=8, IS_COUNTING=is_counting, NUM_BLOCKS=triton.next_power_of_2(blocks.num_blocks),
        NUM_CANDIDATES=_NUM_CANDIDATES, **constants,
    )  # fmt: skip
    if has_random:
        launch(
            search_kernel, (num_rows,), *inputs, scratch.largest, scratch.totals, scratch.candidates, token_ids,
            is_good, vocab_size, num_warps=16, IS_COUNTING=is_counting, NUM_CANDIDATES=_NUM_CANDIDATES,
            TILE=min(_SEARCH_TILE, triton.next_power_of_2(vocab_size)),
        )  # fmt: skip
    return token_ids, is_good


@dataclass(frozen=True, slots=True)
class _Scratch:
    """What the kernels of random rows leave for themselves and for each other."""

    blocks: torch.Tensor | None = None  # [num_rows, num_blocks] int32
    candidates: torch.Tensor | None = None  # [num_rows, 2, _NUM_CANDIDATES] float32
    candidate_ids: torch.Tensor | None = None  # [num_rows, 2, _NUM_CANDIDATES] int32
    largest: torch.Tensor | None = None  # [num_rows] float32
    totals: torch.Tensor | None = None  # [num_rows] float64

    @staticmethod
    def of(maxima: torch.Tensor) -> _Scratch:
        num_rows = len(maxima)
        candidates = maxima.new_empty((num_rows, 2, _NUM_CANDIDATES))
        return _Scratch(
            torch.empty_like(maxima, dtype=torch.int32),
            candidates,
            torch.empty_like(candidates, dtype=torch.int32),
            maxima.new_empty((num_rows,)),
            maxima.new_empty((num_rows,), dtype=torch.float64),
        )
