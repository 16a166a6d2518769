"""Sampling on a GPU without sorting a row.

The logits are read once, and a small part of them a second time.

A first kernel reads all logits and writes the maximum of each block of them, and its weight where a row is random. A
second one, a program per row, has all it needs for the argmax and for a draw from the whole vocabulary but one
block. A top-k set, a nucleus or what min-p keeps lies in the blocks whose maxima are among the largest; these it reads
again. Rows whose set turns out to be larger than the candidates are left to a third kernel, which reads them several
times; it finds nothing to do in nearly all steps.

No program reads more than one row, and all sums are over blocks and tiles of sizes that the vocabulary decides: a row's
token is the same in any batch. Scratch memory is what `torch.empty` gives: 2 to 3 % of the logits, and 8 KB a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from llmstack_kernels.launch import launch, supports_dependent_launch
from llmstack_kernels.sample_tokens.state import SamplingState
from llmstack_kernels.sample_tokens.triton_choice import block_kernel, choice_kernel
from llmstack_kernels.sample_tokens.triton_search import search_kernel

_NUM_CANDIDATES = 512
"""Twice the largest set that is inverted by rank: a bound taken from maxima of blocks lets some more tokens pass."""
_TILE = 2048
"""Logits that a program has in registers; more of them spill where rows are masked and penalised at once."""
_GATHERED = 2048
"""The same of blocks that hold candidates; half as many of rows that are masked or penalised."""
_MAX_TILES = 4
_MANY_ROWS = 32
"""Rows from which a program of the first kernel reads several tiles: it looks up its row's parameters once."""


@dataclass(frozen=True, slots=True)
class _Blocks:
    """The blocks of a row; they follow from the vocabulary alone."""

    block: int
    num_blocks: int
    tile_blocks: int

    @staticmethod
    def of(vocab_size: int) -> _Blocks:
        # About a thousand maxima fit into the registers of a program, and are four for each candidate wanted.
        padded_size = triton.next_power_of_2(vocab_size)
        block = min(256, max(1, padded_size // 1024))
        return _Blocks(block, -(-vocab_size // block), min(_TILE, padded_size) // block)


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
    counts = state.token_counts if has_penalties else None
    bitmask_words = 0 if bitmask is None else bitmask.shape[1]
    inputs = (
        logits, logits.stride(0), rows, state.parameters, state.num_outputs, counts, bitmask, bitmask_words
    )  # fmt: skip
    sums = torch.empty_like(maxima) if has_random else None
    chained = {"launch_pdl": supports_dependent_launch(logits.device)}
    num_tiles = 1 if num_rows < _MANY_ROWS else _MAX_TILES
    launch(
        block_kernel, (triton.cdiv(blocks.num_blocks, blocks.tile_blocks * num_tiles), num_rows), *inputs,
        maxima, sums, vocab_size, blocks.num_blocks,
        num_warps=8, HAS_RANDOM=has_random, NUM_TILES=num_tiles, BLOCK=blocks.block, TILE_BLOCKS=blocks.tile_blocks,
        **chained,
    )  # fmt: skip
    scratch = _Scratch.of(maxima) if has_random else _Scratch()
    gathered = _GATHERED if counts is None and bitmask is None else _GATHERED // 2
    launch(
        choice_kernel, (num_rows,), *inputs, maxima, sums, scratch.blocks, scratch.candidates, scratch.candidate_ids,
        scratch.largest, scratch.totals, token_ids, is_good, vocab_size, blocks.num_blocks,
        num_warps=8, HAS_RANDOM=has_random, IS_COUNTING=is_counting, BLOCK=blocks.block,
        TILE_BLOCKS=min(gathered // max(128, blocks.block), blocks.tile_blocks),
        NUM_BLOCKS=triton.next_power_of_2(blocks.num_blocks), NUM_CANDIDATES=_NUM_CANDIDATES,
        **chained,
    )  # fmt: skip
    if has_random:
        launch(
            search_kernel, (num_rows,), *inputs, scratch.largest, scratch.totals, scratch.candidates, token_ids,
            is_good, vocab_size, num_warps=16, IS_COUNTING=is_counting, NUM_CANDIDATES=_NUM_CANDIDATES,
            TILE=min(_TILE, triton.next_power_of_2(vocab_size)), **chained,
        )  # fmt: skip
    return token_ids, is_good


@dataclass(frozen=True, slots=True)
class _Scratch:
    """Memory in which the kernels of random rows leave results for each other."""

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
