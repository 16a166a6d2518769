"""Cross attention of a decoder to what an encoder made of one input."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from llmstack_kernels.paged_attention import AttentionInputs, paged_attention
from llmstack_model_runner.layers.attention_metadata import CrossRows, LayerCache
from llmstack_model_runner.layers.head_split import HeadSplit
from llmstack_model_runner.layers.linear import Linear
from llmstack_model_runner.layers.norm import LayerNorm
from llmstack_model_runner.layers.packing import packing
from llmstack_model_runner.layers.weight_slot import WeightSlot, collect_slots


@dataclass(frozen=True, slots=True)
class CrossNames:
    """Names of the parts in the checkpoint, without the block's prefix. Keys have no bias, the others have one.

    Attributes:
        norm: Of the norm before it.
        out: Of the projection behind it.
    """

    norm: str
    query: str
    key: str
    value: str
    out: str


class CrossKVSpec(NamedTuple):
    """Keys and values that layers keep of an encoder's output, for cross attention.

    Attributes:
        num_layers: Layers of this stage.
        num_heads: Heads of this rank.
        head_dim: Width of a key or value.
        num_vectors: Of the largest item, for which each one has room.
        vector_size: Numbers that all layers and ranks keep of one vector.
    """

    num_layers: int
    num_heads: int
    head_dim: int
    num_vectors: int
    vector_size: int


class CrossAttention:
    """A norm, attention to an encoder's output, and the residual.

    Keys and values are computed once for each input, and stay in blocks that a token's row names.
    """

    def __init__(
        self, prefix: str, names: CrossNames, sizes: tuple[int, int, int], eps: float, *, dtype: torch.dtype,
        device: torch.device,
    ) -> None:  # fmt: skip
        """`sizes`: Width of a hidden state, number of heads of the whole model, and width of one."""
        size, num_heads, self._head_dim = sizes
        split = HeadSplit(num_heads, num_heads, self._head_dim)
        query, key, value, out = (prefix + name for name in (names.query, names.key, names.value, names.out))
        features, outputs = num_heads * self._head_dim, split.outputs((query, key, value))
        linear = partial(Linear, has_bias=True, dtype=dtype, device=device)
        self._norm = LayerNorm(prefix + names.norm, size, eps, dtype=dtype, device=device)
        self._query = linear(size, {query: features}, part_to_outputs={query: outputs[query]})
        self._key_value = linear(
            size, {key: features, value: features}, parts_without_bias=[key],
            part_to_outputs={name: outputs[name] for name in (key, value)},
        )  # fmt: skip
        self._out = linear(features, {out: size}, inputs=split.inputs)
        self._scale = self._head_dim**-0.5
        self._is_batch_invariant = packing().is_batch_invariant

    def slots(self) -> dict[str, WeightSlot]:
        return collect_slots([self._norm, self._query, self._key_value, self._out])

    def keys_and_values(self, encoded: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of an encoder's output [num_vectors, size]: [heads of this rank, num_vectors, head_dim]."""
        keys, values = self._key_value(encoded).unflatten(-1, (2, -1, self._head_dim)).transpose(0, 2).unbind(1)
        return keys, values

    def queries(self, hidden: torch.Tensor) -> torch.Tensor:
        """Of hidden states [num_tokens, size]: [num_tokens, num_heads of this rank, head_dim]."""
        queries: torch.Tensor = self._query(self._norm(hidden)).unflatten(-1, (-1, self._head_dim))
        return queries

    def __call__(self, hidden: torch.Tensor, cache: LayerCache, rows: CrossRows) -> torch.Tensor:
        """[num_tokens, size] to the same, the residual added. `cache`: Keys and values of this layer."""
        keys, values = cache
        queries = self.queries(hidden)
        if rows.queries is not None:
            rows.queries.append(queries)
        attended = paged_attention(
            AttentionInputs(
                queries, keys, values, rows.query_start_loc, rows.seq_lens, rows.block_tables, self._scale,
                query_start_loc_list=rows.query_start_loc_list, seq_lens_list=rows.seq_lens_list, max_query_len=1,
                decodes_as_prefills=self._is_batch_invariant,
            )
        )  # fmt: skip
        return self._out(attended.flatten(1), residual=hidden)
