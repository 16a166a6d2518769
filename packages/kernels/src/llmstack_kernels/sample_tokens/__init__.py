"""Sampling of a token per row on the device, with parameters stored there."""

from __future__ import annotations

import torch

from llmstack_kernels.dispatch import implementation
from llmstack_kernels.sample_tokens.state import MAX_ENDING_TOKENS, NUM_WORDS, RowParameters, SamplingState

__all__ = ["MAX_ENDING_TOKENS", "NUM_WORDS", "RowParameters", "SamplingState", "sample_tokens"]


def sample_tokens(
    logits: torch.Tensor,
    rows: torch.Tensor,
    state: SamplingState,
    *,
    bitmask: torch.Tensor | None = None,
    has_random: bool = True,
    has_penalties: bool = False,
    is_counting: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids (int64) and whether each is good (bool), both [num_rows]; never waits for the device.

    The order is: bitmask, ending tokens before `min_tokens`, penalties (repetition, frequency, presence), then the
    argmax; or temperature, min-p, top-k, top-p, and a draw by inverting the distribution function at a number
    that depends on the row's seed and its count of output tokens alone. Sets of up to 255 tokens, or 256 under top-k,
    are inverted from the most likely token down (ties by id), others in the order of ids. A token is not good, and 0,
    where logits hold NaN, the largest is infinite, or no token is allowed.

    Args:
        logits: Floating point, rows contiguous, left as they are. [num_rows, vocab_size]
        rows: Numbers of rows of `state`; distinct, except for rows that are not read. int32 [num_rows]
        state: Parameters and counts of persistent rows.
        bitmask: Token t may be chosen if bit t % 32 of word t // 32 is set. int32 [num_rows, ceil(vocab_size / 32)]
        has_random: False if all rows are greedy.
        has_penalties: False if no row has penalties.
        is_counting: Whether `num_outputs` goes up by one in each of `rows`, and the count of the chosen token in those
            with penalties.

    Raises:
        ValueError: Shapes or types that do not fit.
    """
    _check(logits, rows, state, bitmask, has_penalties)
    found: tuple[torch.Tensor, torch.Tensor] = implementation("sample_tokens", logits.device.type).sample_tokens(
        logits, rows, state, bitmask, has_random, has_penalties, is_counting
    )
    return found


def _check(
    logits: torch.Tensor, rows: torch.Tensor, state: SamplingState, bitmask: torch.Tensor | None, has_penalties: bool
) -> None:
    if logits.ndim != 2 or not logits.shape[1] or logits.stride(1) != 1 or not logits.is_floating_point():
        raise ValueError(f"logits must be floating point [num_rows, vocab_size], got {logits.dtype} {_shape(logits)}")
    num_rows, vocab_size = logits.shape
    if rows.dtype != torch.int32 or rows.shape != (num_rows,):
        raise ValueError(f"rows must be int32 [{num_rows}], got {rows.dtype} {_shape(rows)}")
    if state.parameters.dtype != torch.int64 or state.parameters.shape[1:] != (NUM_WORDS,):
        raise ValueError(f"parameters must be int64 [*, {NUM_WORDS}], got {_shape(state.parameters)}")
    expected = (num_rows, -(-vocab_size // 32))
    if bitmask is not None and (bitmask.dtype != torch.int32 or bitmask.shape != expected):
        raise ValueError(f"the bitmask must be int32 {list(expected)}, got {bitmask.dtype} {_shape(bitmask)}")
    counts = state.token_counts
    if has_penalties and (counts is None or counts.dtype != torch.int32 or counts.shape[1:] != (vocab_size,)):
        raise ValueError(f"penalties need token_counts, int32 [*, {vocab_size}]")


def _shape(tensor: torch.Tensor) -> list[int]:
    return list(tensor.shape)
