"""Which tokens of a flat batch belong to which request, and where their keys and values lie."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """One step's layout, shared by all layers. Rows are requests, tokens are flat: row i owns tokens
    [query_start_loc[i], query_start_loc[i + 1]), the last tokens of its context of seq_lens[i] tokens.

    Attributes:
        query_start_loc: Prefix sums of the rows' scheduled tokens; int32.
        seq_lens: Context length of each row including this step's tokens; int32.
        block_tables: Block ids of each row, padded with 0; int32.
        slot_mapping: Where each token's KV is written: block_id * block_size + offset; int64.
        query_start_loc_list: `query_start_loc` as Python integers, which spares CPU kernels reading it; None where only
            the device knows.
        seq_lens_list: `seq_lens` likewise.
        max_query_len: Longest row in tokens of this step; 1 means that every row decodes.
        max_seq_len: Longest context, or a bound of it where only the device knows.
    """

    query_start_loc: torch.Tensor  # [num_rows + 1]
    seq_lens: torch.Tensor  # [num_rows]
    block_tables: torch.Tensor  # [num_rows, max_blocks_per_row]
    slot_mapping: torch.Tensor  # [num_tokens]
    query_start_loc_list: list[int] | None
    seq_lens_list: list[int] | None
    max_query_len: int
    max_seq_len: int
