"""Sparse latent attention, over tokens that an indexer selects.

DeepSeek V3.2 (arXiv 2512.02556, section 2.1). The indexer keeps a key of its own of each token, beside the latent.
While no context of a step is longer than what it selects, nothing else is computed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch

from llmstack_kernels.key_selection import SelectionInputs, select_keys
from llmstack_kernels.paged_attention import AttentionInputs
from llmstack_kernels.reshape_and_cache import reshape_and_cache
from llmstack_kernels.rotary_embedding import rotary_embedding
from llmstack_model_runner.layers.attention_metadata import AttentionMetadata, LayerStep
from llmstack_model_runner.layers.linear import Linear
from llmstack_model_runner.layers.norm import LayerNorm
from llmstack_model_runner.layers.rotary import RotaryEmbedding, rotary_order
from llmstack_model_runner.layers.weight_slot import WeightSlot, collect_slots

_NORM_EPS = 1e-6  # whatever the configuration says of others
_MAX_BLOCK = (1 << 31) - 1


@dataclass(slots=True)
class Selection:
    """Tokens that the last layer with an indexer has selected, of a step that is being computed.

    Attributes:
        positions: Of each token that attends, [num_queries, num_selected] int32; None where all are attended to.
    """

    positions: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class IndexerSettings:
    """Sizes of an indexer.

    Attributes:
        num_selected: Tokens that a token attends to, where its context has more.
        is_interleaved: RoPE rotates neighbouring numbers of the checkpoint; otherwise those of two halves.
        is_shared: The layer has no indexer, and attends to what the layer before does.
        selection: What layers of one model share.
    """

    num_heads: int
    head_dim: int
    num_selected: int
    is_interleaved: bool = False
    is_shared: bool = False
    selection: Selection = field(default_factory=Selection, compare=False)


class KeyIndexer:
    """The indexer of a layer. Every rank has all of it, so that all select the same tokens."""

    def __init__(
        self,
        prefix: str,
        size: int,
        query_rank: int,
        settings: IndexerSettings,
        rotary: RotaryEmbedding,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`prefix` is that of its tensors; `query_rank` is the size of the latent that its queries are made of."""
        self._settings, self._rotary = settings, rotary
        num_heads, head_dim = settings.num_heads, settings.head_dim
        rotated = rotary_order(rotary.rotary_dim, is_interleaved=settings.is_interleaved)
        order = torch.cat((rotated, torch.arange(rotary.rotary_dim, head_dim)))
        orders = (torch.arange(num_heads)[:, None] * head_dim + order).flatten()

        def linear(
            inputs: int, name: str, outputs: int, rows: torch.Tensor | None, *, keeps_precision: bool = False
        ) -> Linear:
            return Linear(
                inputs, {name: outputs}, has_bias=False, dtype=dtype, device=device, keeps_precision=keeps_precision,
                part_to_row_order=None if rows is None else {name: rows},
            )  # fmt: skip

        self._queries = linear(query_rank, f"{prefix}wq_b", num_heads * head_dim, orders)
        self._keys = linear(size, f"{prefix}wk", head_dim, order)
        self._key_norm = LayerNorm(f"{prefix}k_norm", head_dim, _NORM_EPS, dtype=dtype, device=device, order=order)
        self._weights = linear(size, f"{prefix}weights_proj", num_heads, None, keeps_precision=True)
        self._factor = 1 / math.sqrt(num_heads * head_dim)

    def slots(self) -> dict[str, WeightSlot]:
        """Slots of its projections and of its norm."""
        return collect_slots([self._queries, self._keys, self._key_norm, self._weights])

    def write(
        self,
        x: torch.Tensor,  # [num_tokens, size]
        step: LayerStep,
        key_scale: torch.Tensor | None,
    ) -> None:
        """Writes the tokens' keys beside their latents."""
        key = self._key_norm(self._keys(x)).unsqueeze(1)
        key, _ = rotary_embedding(step.positions, key, key[:, :0], self._rotary.table)
        reshape_and_cache(key, None, step.kv_cache[1], None, step.metadata.slot_mapping, key_scale)

    def select(
        self,
        x: torch.Tensor,  # [num_tokens, size]
        query_latent: torch.Tensor,  # [num_tokens, query_rank]
        step: LayerStep,
        key_scale: torch.Tensor | None,
    ) -> torch.Tensor | None:  # [num_queries, num_selected] int32
        """The positions of the tokens to attend to; None where these are all."""
        settings, metadata = self._settings, step.metadata
        selection = settings.selection
        selection.positions = None
        if metadata.max_seq_len > settings.num_selected:
            query = self._queries(metadata.of_queries(query_latent)).unflatten(-1, (settings.num_heads, -1))
            positions = metadata.of_queries(step.positions)
            query, _ = rotary_embedding(positions, query, query[:, :0], self._rotary.table)
            selection.positions = select_keys(
                SelectionInputs(
                    query,
                    self._weights(metadata.of_queries(x)).float() * self._factor,
                    step.kv_cache[1],
                    metadata.query_start_loc,
                    metadata.seq_lens,
                    metadata.block_tables,
                    settings.num_selected,
                    metadata.query_start_loc_list,
                    metadata.seq_lens_list,
                    key_scale,
                )
            )
        return selection.positions


def selected_before(selection: Selection, metadata: AttentionMetadata) -> torch.Tensor | None:
    """The selection of a layer before, for the tokens that attend in this one, which may be fewer."""
    positions = selection.positions
    return None if positions is None else metadata.of_queries(positions)


def attend_to_selected(
    inputs: AttentionInputs,
    positions: torch.Tensor,  # [num_tokens, num_selected] int32
) -> AttentionInputs:
    """The same attention over selected tokens alone, in place of whole contexts.

    Each token is a row of its own, and each slot of the cache a block, so nothing is copied.
    """
    num_tokens, num_selected = positions.shape
    starts = torch.arange(num_tokens + 1, dtype=torch.int32, device=positions.device)
    ends = inputs.query_start_loc[1:]
    rows = torch.searchsorted(ends, starts[:-1], right=True)
    seq_lens = (inputs.seq_lens[rows] - ends[rows] + starts[1:]).clamp_(max=num_selected)
    block_size = inputs.key_cache.shape[2]
    slots, block_step, slot_step = _by_slot(inputs.key_cache)
    # Of 32 bits, and in place: a step may have thousands of tokens, each with thousands of positions.
    block_tables = inputs.block_tables[rows[:, None], positions // block_size].mul_(block_step)
    block_tables.add_(positions % block_size, alpha=slot_step)
    lists = inputs.query_start_loc_list, inputs.seq_lens_list
    return inputs._replace(
        key_cache=slots,
        value_cache=slots[..., : inputs.value_cache.shape[3]],
        query_start_loc=starts,
        seq_lens=seq_lens,
        block_tables=block_tables,
        query_start_loc_list=None if lists[0] is None else list(range(num_tokens + 1)),
        seq_lens_list=None if lists[0] is None or lists[1] is None else _lengths(lists[0], lists[1], num_selected),
        max_query_len=1,
        plan=None,
    )


def _lengths(starts: Sequence[int], seq_lens: Sequence[int], most: int) -> list[int]:
    """The length of each token's context, at most `most`."""
    return [
        min(seq_len - end + token + 1, most)
        for (start, end), seq_len in zip(pairwise(starts), seq_lens, strict=True)
        for token in range(start, end)
    ]


def _by_slot(cache: torch.Tensor) -> tuple[torch.Tensor, int, int]:
    """The cache with blocks of one slot, which overlap; how far a block is from the next among them, and a slot.

    Distances between blocks need not be whole slots: other tensors lie between them.
    """
    num_blocks, _, block_size, width = cache.shape
    step = math.gcd(cache.stride(0), width)
    block_step, slot_step = cache.stride(0) // step, width // step
    num_slots = (num_blocks - 1) * block_step + (block_size - 1) * slot_step + 1
    if num_slots > _MAX_BLOCK:
        raise ValueError(f"the KV storage has {num_slots} places for latents, more than block tables can name")
    return cache.as_strided((num_slots, 1, 1, width), (step, width, width, 1)), block_step, slot_step
