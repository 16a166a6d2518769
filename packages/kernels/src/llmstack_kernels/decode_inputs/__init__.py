"""Inputs of a decode step, made on the device from the state of its rows.

The host sends nothing.

The state has a line per row: its last known token, that token's position, and its block ids. The last line is a scratch
row, whose only block belongs to no request: rows that only pad a batch point to it, and it never advances.

With drafts a row has several tokens in a step, each with a line of its own in the inputs: its last known token, then
its drafts in order. An array of the step says which is which, `drafts`, int32 [num_tokens, 2]: how many places behind
the last known token of its row each token stands, and the token's id, which counts where it is a draft.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from llmstack_kernels.dispatch import implementation

LAST_TOKEN = 0
"""Column of the state: the last token that is known, which a decode computes."""

POSITION = 1
"""Column of the state: where that token stands; as many tokens of the row have KV."""

FIRST_BLOCK = 2
"""Column of the state from which on the block ids lie."""


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """The inputs of a decode step, one token per row; written by `decode_inputs`."""

    token_ids: torch.Tensor  # [num_rows] int64
    positions: torch.Tensor  # [num_rows] int64
    seq_lens: torch.Tensor  # [num_rows] int32
    slot_mapping: torch.Tensor  # [num_rows] int64
    block_tables: torch.Tensor  # [num_rows, max_blocks_per_row] int32


def update_rows(state: torch.Tensor, updates: torch.Tensor) -> None:
    """Set `state[row, column] = value` for each update; no place occurs twice.

    Args:
        state: int32 [num_state_rows, 2 + max_blocks_per_row]
        updates: Row, column and value of each. int32 [num_updates, 3]
    """
    _check(state)
    if updates.dtype != torch.int32 or updates.ndim != 2 or updates.shape[1] != 3:
        raise ValueError(f"updates must be int32 [num_updates, 3], got {updates.dtype} {tuple(updates.shape)}.")
    implementation("decode_inputs", state.device.type).update_rows(state, updates)


def decode_inputs(
    state: torch.Tensor, rows: torch.Tensor, block_size: int, out: DecodeInputs, drafts: torch.Tensor | None = None
) -> None:
    """Write the inputs of the given rows of the state to `out`.

    Block tables are written as far as each row's context goes; what lies behind keeps what it was.

    Args:
        state: int32 [num_state_rows, 2 + max_blocks_per_row]
        rows: Numbers of rows of the state; the scratch row may occur any number of times. int32 [num_rows]
        block_size: Tokens per block.
        out: Inputs of `num_rows` rows, with as many columns of blocks as the state has.
        drafts: Which of `rows` stand for drafts; None if no row has any. int32 [num_rows, 2]
    """
    _check(state)
    _check_drafts(drafts, len(rows))
    if out.block_tables.shape != (len(rows), state.shape[1] - FIRST_BLOCK):
        raise ValueError(
            f"block tables of shape {tuple(out.block_tables.shape)} do not fit {len(rows)} rows of a state of shape"
            f" {tuple(state.shape)}."
        )
    implementation("decode_inputs", state.device.type).decode_inputs(state, rows, block_size, out, drafts)


def advance_rows(
    state: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor, is_good: torch.Tensor, results: torch.Tensor
) -> None:
    """Makes each row's new token its last one, a position further, and writes it to `results`.

    A row whose token is not good goes on with token 0 and has -1 in `results`: the host learns of it a step later.

    Args:
        state: int32 [num_state_rows, 2 + max_blocks_per_row]
        rows: Numbers of rows of the state; the scratch row is left as it is. int32 [num_rows]
        token_ids: int64 [num_rows]
        is_good: bool [num_rows]
        results: Overwritten. int32 [num_rows]
    """
    _check(state)
    if not len(rows) == len(token_ids) == len(is_good) == len(results):
        raise ValueError(
            f"{len(token_ids)} tokens, {len(is_good)} flags and {len(results)} results do not fit {len(rows)} rows."
        )
    implementation("decode_inputs", state.device.type).advance_rows(state, rows, token_ids, is_good, results)


def keep_drafts(
    state: torch.Tensor,
    rows: torch.Tensor,
    drafts: torch.Tensor,
    token_ids: torch.Tensor,
    is_good: torch.Tensor,
    num_kept: torch.Tensor,
) -> None:
    """Advances each row by its right drafts and the token behind them, which becomes its last one.

    A draft is right if it equals the token that was chosen one place before it, and all drafts before it are right.
    A token that is not good ends its row, which goes on with token 0.

    Args:
        state: int32 [num_state_rows, 2 + max_blocks_per_row]
        rows: Numbers of rows of the state, each as often as it has tokens; the scratch row is left as it is. int32
            [num_tokens]
        drafts: int32 [num_tokens, 2]
        token_ids: The token chosen behind each place. int64 [num_tokens]
        is_good: bool [num_tokens]
        num_kept: Overwritten: at the last place of a row that is kept, how many of its tokens are; 0 at all others.
            int64 [num_tokens]
    """
    _check(state)
    _check_drafts(drafts, len(rows))
    if not len(rows) == len(token_ids) == len(is_good) == len(num_kept):
        raise ValueError(
            f"{len(token_ids)} tokens, {len(is_good)} flags and {len(num_kept)} numbers do not fit {len(rows)} rows."
        )
    implementation("decode_inputs", state.device.type).keep_drafts(state, rows, drafts, token_ids, is_good, num_kept)


def _check_drafts(drafts: torch.Tensor | None, num_rows: int) -> None:
    if drafts is None:
        return
    if drafts.dtype != torch.int32 or drafts.shape != (num_rows, 2) or not drafts.is_contiguous():
        raise ValueError(f"drafts must be contiguous int32 [{num_rows}, 2], got {drafts.dtype} {tuple(drafts.shape)}.")


def _check(state: torch.Tensor) -> None:
    if state.dtype != torch.int32 or state.ndim != 2 or state.shape[1] <= FIRST_BLOCK or not state.is_contiguous():
        raise ValueError(f"the state must be contiguous int32 of {FIRST_BLOCK} columns and blocks, got {state.shape}.")
