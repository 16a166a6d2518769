"""The inputs of decode steps in plain PyTorch."""

from __future__ import annotations

import torch

from llmstack_kernels.decode_inputs import FIRST_BLOCK, LAST_TOKEN, POSITION, DecodeInputs


def update_rows(state: torch.Tensor, updates: torch.Tensor) -> None:
    rows, columns, values = updates.unbind(1)
    state.index_put_((rows.long(), columns.long()), values)


def decode_inputs(state: torch.Tensor, rows: torch.Tensor, block_size: int, out: DecodeInputs) -> None:
    """Gathers the rows, then selects the inputs of each context."""
    lines = state[rows.long()]
    positions = lines[:, POSITION].long()
    block_indices = positions // block_size
    block_tables = lines[:, FIRST_BLOCK:]
    blocks = block_tables.gather(1, block_indices[:, None]).squeeze(1).long()
    out.token_ids.copy_(lines[:, LAST_TOKEN])
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
