"""Operands of the Triton kernels of attention: checked inputs and their sizes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from llmstack_kernels.paged_attention.inputs import AttentionInputs


@dataclass(frozen=True, slots=True)
class Operands:
    """Inputs of paged attention in the memory layout of the kernels, and the result that they fill.

    The heads of a query are contiguous; tokens, and blocks of the cache, may be at any distance.

    Raises:
        ValueError: The memory has another layout.
    """

    inputs: AttentionInputs
    out: torch.Tensor  # [num_tokens, num_heads, head_dim]

    def __post_init__(self) -> None:
        inputs = self.inputs
        _, _, block_size, head_dim = inputs.key_cache.shape
        if inputs.key_cache.stride() != inputs.value_cache.stride():
            raise ValueError("Blocks of keys and of values must lie at the same distances.")
        if inputs.key_cache.stride()[1:] != (block_size * head_dim, head_dim, 1) or inputs.block_tables.stride(1) != 1:
            raise ValueError("Each block of keys and each row of the block tables must be contiguous.")
        if not inputs.query_start_loc.dtype == inputs.seq_lens.dtype == inputs.block_tables.dtype == torch.int32:
            raise ValueError("query_start_loc, seq_lens and block_tables must be int32.")

    @property
    def num_rows(self) -> int:
        return self.inputs.seq_lens.shape[0]

    @property
    def num_heads(self) -> int:
        return self.inputs.query.shape[1]

    @property
    def num_kv_heads(self) -> int:
        """Heads of keys and values."""
        return self.inputs.key_cache.shape[1]

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def block_size(self) -> int:
        return self.inputs.key_cache.shape[2]

    @property
    def head_dim(self) -> int:
        """Numbers of a head."""
        return self.inputs.query.shape[2]

    @property
    def padded_dim(self) -> int:
        """Numbers of a head as they lie in a tile."""
        padded: int = triton.next_power_of_2(self.head_dim)
        return padded

    @property
    def max_seq_len(self) -> int:
        """The longest context that the block tables can hold."""
        return self.inputs.block_tables.shape[1] * self.block_size

    @property
    def is_wide(self) -> bool:
        """Whether products are of float32, which takes twice the room."""
        return self.inputs.query.dtype == torch.float32
