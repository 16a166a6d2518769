"""What the kernels for decode and prefill are called with, checked and laid out as they read it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton


@dataclass(frozen=True, slots=True)
class Operands:
    """Arguments of `paged_attention`, and its result, which the kernels fill.

    ValueError where memory is not laid out as the kernels read it; a query whose heads lie apart is copied.
    """

    query: torch.Tensor  # [num_tokens, num_heads, head_dim]; heads one after another, tokens at any distance
    key_cache: torch.Tensor  # [num_blocks, num_kv_heads, block_size, head_dim]; blocks at any distance
    value_cache: torch.Tensor  # likewise, at the same distance
    query_start_loc: torch.Tensor  # [num_rows + 1] int32
    seq_lens: torch.Tensor  # [num_rows] int32
    block_tables: torch.Tensor  # [num_rows, max_blocks_per_row] int32
    alibi_slopes: torch.Tensor | None  # [num_heads] float32
    key_scale: torch.Tensor | None  # [num_kv_heads] float32
    value_scale: torch.Tensor | None  # [num_kv_heads] float32
    out: torch.Tensor  # [num_tokens, num_heads, head_dim]
    scale: float
    soft_cap: float | None
    sliding_window: int | None

    def __post_init__(self) -> None:
        """Checks what the kernels take for granted."""
        _, _, block_size, head_dim = self.key_cache.shape
        if self.key_cache.stride() != self.value_cache.stride():
            raise ValueError("Blocks of keys and of values must lie at the same distances.")
        if self.key_cache.stride()[1:] != (block_size * head_dim, head_dim, 1) or self.block_tables.stride(1) != 1:
            raise ValueError("Each block of keys and each row of the block tables must be contiguous.")
        if not self.query_start_loc.dtype == self.seq_lens.dtype == self.block_tables.dtype == torch.int32:
            raise ValueError("query_start_loc, seq_lens and block_tables must be int32.")

    @property
    def num_rows(self) -> int:
        """Rows of the batch."""
        return self.seq_lens.shape[0]

    @property
    def num_heads(self) -> int:
        """Query heads."""
        return self.query.shape[1]

    @property
    def num_kv_heads(self) -> int:
        """Heads of keys and values."""
        return self.key_cache.shape[1]

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def block_size(self) -> int:
        """Slots of a block."""
        return self.key_cache.shape[2]

    @property
    def head_dim(self) -> int:
        """Numbers of a head."""
        return self.query.shape[2]

    @property
    def padded_dim(self) -> int:
        """Numbers of a head as they lie in a tile."""
        padded: int = triton.next_power_of_2(self.head_dim)
        return padded

    @property
    def max_seq_len(self) -> int:
        """The longest context that the block tables can hold."""
        return self.block_tables.shape[1] * self.block_size

    @property
    def is_wide(self) -> bool:
        """Whether products are of float32, which takes twice the room."""
        return self.query.dtype == torch.float32
