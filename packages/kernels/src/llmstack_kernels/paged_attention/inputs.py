"""Inputs of paged attention, which every backend receives as they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from llmstack_kernels.float8_cache import check_scales


class AttentionInputs(NamedTuple):
    """The inputs of paged attention: a mix of prefill chunks and decodes, and the cache they read.

    Row i owns the tokens [query_start_loc[i], query_start_loc[i + 1]). They are the last tokens of its context, which
    has seq_lens[i] tokens. The context's keys and values, those of this step included, are in the blocks of
    `block_tables[i]`. Values of tensors are not read before the kernel, which trusts them: block ids have to be in the
    cache. `num_heads` is a multiple of `num_kv_heads`; neighbouring query heads share a KV head. Values may be narrower
    than keys, and may be the first numbers of the keys, as of latent attention: `value_cache` is then a view.

    The order of fields is the order of positional arguments. A named tuple is built in every layer of every step, and
    costs a third of a frozen dataclass.

    Attributes:
        scale: Factor for q·k.
        query_start_loc_list: The values of `query_start_loc`, so that a CPU need not convert the tensor.
        seq_lens_list: The values of `seq_lens`.
        max_query_len: Upper bound of the tokens of a row. Without the lists it decides which kernels are launched on a
            GPU; 1 means that every row is a decode.
        sliding_window: A token attends to itself and the `sliding_window - 1` tokens before it.
        soft_cap: Scores become soft_cap * tanh(score / soft_cap).
        alibi_slopes: Adds slope * (position of the key - position of the query) to each score, after the soft cap.
        sinks: A score of each query head that has no value: it takes its share of the softmax, after cap and slopes.
        key_scale: With caches of float8_e4m3fn: a key is the stored number times its head's scale.
        value_scale: As `key_scale`, for values.
        plan: The result of `plan_paged_attention` for the same rows.
        decodes_as_prefills: A row of one token gets the bits that the token has within a prompt, even where decodes
            have kernels of their own. Long contexts then take more time.
    """

    query: torch.Tensor  # [num_tokens, num_heads, head_dim]
    key_cache: torch.Tensor  # [num_blocks, num_kv_heads, block_size, head_dim]
    value_cache: torch.Tensor  # [num_blocks, num_kv_heads, block_size, value_dim]
    query_start_loc: torch.Tensor  # [num_rows + 1] int32
    seq_lens: torch.Tensor  # [num_rows] int32
    block_tables: torch.Tensor  # [num_rows, max_blocks_per_row] int32
    scale: float
    query_start_loc_list: Sequence[int] | None = None
    seq_lens_list: Sequence[int] | None = None
    max_query_len: int | None = None
    sliding_window: int | None = None
    soft_cap: float | None = None
    alibi_slopes: torch.Tensor | None = None  # [num_heads] float32
    sinks: torch.Tensor | None = None  # [num_heads] float32
    key_scale: torch.Tensor | None = None  # [num_kv_heads] float32
    value_scale: torch.Tensor | None = None  # [num_kv_heads] float32
    plan: object | None = None
    decodes_as_prefills: bool = False

    def check(self) -> None:
        """Raises ValueError if shapes, rows or scales do not fit together."""
        num_heads, num_kv_heads = self.query.shape[1], self.key_cache.shape[1]
        are_alike = self.key_cache.shape[:3] == self.value_cache.shape[:3]
        if not are_alike or not self.value_cache.shape[3] <= self.key_cache.shape[3] == self.query.shape[2]:
            shapes = [tuple(x.shape) for x in (self.query, self.key_cache, self.value_cache)]
            raise ValueError(f"A query of shape {shapes[0]} does not fit caches of {shapes[1]} and {shapes[2]}.")
        if not num_heads or num_heads % num_kv_heads:
            raise ValueError(f"{num_heads} query heads cannot share {num_kv_heads} KV heads evenly.")
        self._check_rows()
        check_scales(self.key_cache, self.key_scale, self.value_scale)
        for name, values in (("alibi_slopes", self.alibi_slopes), ("sinks", self.sinks)):
            if values is not None and values.shape != (num_heads,):
                raise ValueError(f"{name} of shape {tuple(values.shape)} do not fit {num_heads} query heads.")

    def _check_rows(self) -> None:
        starts, seq_lens, num_tokens = self.query_start_loc_list, self.seq_lens_list, self.query.shape[0]
        if starts is None or seq_lens is None:
            if starts is not None or seq_lens is not None:
                raise ValueError("query_start_loc_list and seq_lens_list go together.")
            if self.max_query_len is None:
                raise ValueError("max_query_len must be given where query_start_loc_list and seq_lens_list are not.")
        elif len(starts) != len(seq_lens) + 1 or starts[-1] != num_tokens:
            raise ValueError(f"query_start_loc does not divide {num_tokens} tokens into {len(seq_lens)} rows.")
        elif seq_lens and max(seq_lens) > (most := self.block_tables.shape[-1] * self.key_cache.shape[2]):
            raise ValueError(f"A block table of {most} slots has no room for a context of {max(seq_lens)} tokens.")
