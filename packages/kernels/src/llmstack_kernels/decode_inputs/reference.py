"""The inputs of decode steps in plain PyTorch."""

from __future__ import annotations

import torch

from llmstack_kernels.decode_inputs import FIRST_BLOCK, LAST_TOKEN, POSITION, DecodeInputs


def update_rows(state: torch.Tensor, updates: torch.Tensor) -> None:
    rows, columns, values = updates.unbind(1)
    state.index_put_((rows.long(), columns.long()), values)


def decode_inputs(
    state: torch.Tensor, rows: torch.Tensor, block_size: int, out: DecodeInputs, drafts: torch.Tensor | None = None
) -> None:
    """Gathers the rows, then selects the inputs of each context."""
    lines = state[rows.long()]
    token_ids, positions = lines[:, LAST_TOKEN], lines[:, POSITION].long()
    if drafts is not None:
        token_ids, positions = torch.where(drafts[:, 0] > 0, drafts[:, 1], token_ids), positions + drafts[:, 0]
    block_indices = positions // block_size
    block_tables = lines[:, FIRST_BLOCK:]
    blocks = block_tables.gather(1, block_indices[:, None]).squeeze(1).long()
    out.token_ids.copy_(token_ids)
    out.positions.copy_(positions)
    out.seq_lens.copy_(positions + 1)
    out.slot_mapping.copy_(blocks * block_size + positions % block_size)
    is_needed = torch.arange(block_tables.shape[1], device=state.device) <= block_indices[:, None]
    out.block_tables.copy_(torch.where(is_needed, block_tables, out.block_tables))


def advance_rows(
    state: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor, is_good: torch.Tensor, results: torch.Tensor
) -> None:
    """Scatter; the scratch row is written with what it had."""
    index = rows.long()
    is_real = index < len(state) - 1
    tokens = torch.where(is_good, token_ids, 0).int()
    state[index, LAST_TOKEN] = torch.where(is_real, tokens, state[index, LAST_TOKEN])
    state[index, POSITION] += is_real.int()
    results.copy_(torch.where(is_good, token_ids, -1))


def keep_drafts(
    state: torch.Tensor,
    rows: torch.Tensor,
    drafts: torch.Tensor,
    token_ids: torch.Tensor,
    is_good: torch.Tensor,
    num_kept: torch.Tensor,
) -> None:
    """Counts right drafts over all rows; lines that are not the last of a row write to the scratch row what it had."""
    places, scratch_row = drafts[:, 0].long(), len(state) - 1
    is_right = torch.zeros_like(is_good)  # whether the next line is a draft, and right if this one is reached
    is_right[:-1] = is_good[:-1] & (places[1:] > 0) & (token_ids[:-1] == drafts[1:, 1])
    num_right = is_right.cumsum(0) - is_right.long()
    starts = torch.arange(len(rows), device=rows.device) - places
    is_reached = num_right - num_right[starts] == places
    is_last = is_reached & ~is_right & (rows < scratch_row)
    num_kept.copy_(torch.where(is_last, places + 1, 0))
    index = torch.where(is_last, rows.long(), scratch_row)
    tokens = torch.where(is_good, token_ids, 0).int()
    state[index, LAST_TOKEN] = torch.where(is_last, tokens, state[scratch_row, LAST_TOKEN])
    state[index, POSITION] += num_kept.int()
