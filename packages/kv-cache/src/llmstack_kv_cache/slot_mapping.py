"""Slots of the tokens of a flat batch in KV storage; needs the extra `[torch]`."""

from __future__ import annotations

import torch


def compute_slot_mapping(
    block_tables: torch.Tensor, row_indices: torch.Tensor, positions: torch.Tensor, block_size: int
) -> torch.Tensor:
    """Slot of each token: block_id * block_size + offset, int64.

    Args:
        block_tables: Block ids of each row.  # [num_rows, max_blocks_per_row]
        row_indices: The row each token belongs to.  # [num_tokens]
        positions: The place of each token in its request.  # [num_tokens]
        block_size: Tokens per block.
    """
    positions = positions.long()
    block_ids = block_tables[row_indices.long(), positions // block_size].long()  # [num_tokens]
    return block_ids * block_size + positions % block_size
