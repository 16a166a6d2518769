"""Attention metadata: rows of a flat batch, and slots of their keys and values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import torch

from llmstack_kernels.state_rows import StateRows
from llmstack_model_runner.layers.step_vectors import StepVectors

LayerCache = tuple[torch.Tensor, ...]
"""The tensors of a layer in the KV storage, such as keys and values."""

AttentionPlans = Mapping[int | None, object | None]
"""Sliding window to the attention kernel's plan, computed once per step."""


class CrossRows(NamedTuple):
    """The cross attention of a step: each token is a row of its own, which decodes over an encoder's output.

    So a kernel for paged attention sees no later token to mask, and tokens of one item, whose block tables are equal,
    read it together.

    Attributes:
        caches: Keys and values of the encoder's output, of each layer of this stage.
        seq_lens: The vectors of the item; int32.
        queries: Receives the queries of each layer of this stage, where they are of use after the step.
    """

    caches: Sequence[LayerCache]
    query_start_loc: torch.Tensor  # [num_tokens + 1] int32
    seq_lens: torch.Tensor  # [num_tokens]
    block_tables: torch.Tensor  # [num_tokens, num_blocks of an item] int32
    query_start_loc_list: list[int]
    seq_lens_list: list[int]
    queries: list[torch.Tensor] | None = None

    def of_queries(self, queries: torch.Tensor) -> CrossRows:
        """The rows of some tokens, where others have no use for their output."""
        count = len(queries)
        return self._replace(
            query_start_loc=self.query_start_loc[: count + 1], seq_lens=self.seq_lens[:count],
            block_tables=self.block_tables.index_select(0, queries),
            query_start_loc_list=self.query_start_loc_list[: count + 1], seq_lens_list=self.seq_lens_list[:count],
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class GroupTables:
    """The metadata that differs between groups of layers."""

    block_tables: torch.Tensor  # [num_rows, max_blocks_per_row]
    slot_mapping: torch.Tensor  # [num_tokens]


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Layout of one step, shared by all layers.

    Rows are requests and tokens are flat. Row i owns the tokens [query_start_loc[i], query_start_loc[i + 1]), which are
    the last ones of its context of seq_lens[i] tokens.

    Attributes:
        query_start_loc: Prefix sums of the rows' scheduled tokens; int32.
        seq_lens: Context length of each row including this step's tokens; int32.
        block_tables: Block ids of each row, padded with 0; int32.
        slot_mapping: Where each token's KV is written: block_id * block_size + offset; int64.
        query_start_loc_list: `query_start_loc` as Python integers, so that CPU kernels need not read the tensor; None
            if only the device has the values.
        seq_lens_list: `seq_lens` as Python integers, or None.
        max_query_len: Largest number of tokens of a row in this step; 1 means that every row decodes.
        max_seq_len: Longest context, or an upper bound if only the device has the values.
        groups: The same step for each group of layers with block tables of its own; empty where all layers share one.
        layer_to_group: By layer, its place in `groups`; None for a layer with a state.
        queries: The tokens that attend, if not all do; rows, `query_start_loc` and `seq_lens` are then of these alone.
            The keys and values of all tokens are written.
        states: The states of the rows, for layers that have one; None for a model without any.
        last_layer: The layout of the last layer, where only some tokens have a use for its output; None if all have.
        cross: What the tokens attend to of an encoder's output, for layers with cross attention; None for others.
        vectors: What stands in place of the embedding of some tokens; None where all tokens are their ids. A decode
            step has none, since only prompts do: captured steps need no room for them.
    """

    query_start_loc: torch.Tensor  # [num_rows + 1]
    seq_lens: torch.Tensor  # [num_rows]
    block_tables: torch.Tensor  # [num_rows, max_blocks_per_row]
    slot_mapping: torch.Tensor  # [num_tokens]
    query_start_loc_list: list[int] | None
    seq_lens_list: list[int] | None
    max_query_len: int
    max_seq_len: int
    groups: tuple[AttentionMetadata, ...] = ()
    layer_to_group: tuple[int | None, ...] = ()
    queries: torch.Tensor | None = None  # [num_queries] int64
    last_layer: AttentionMetadata | None = None
    states: StateRows | None = None
    vectors: StepVectors | None = None
    cross: CrossRows | None = None

    def starts_of_whole_prompts(self) -> list[int]:
        """`query_start_loc_list` of an encoder; ValueError where a prompt is cut: its tokens attend to later ones."""
        starts = self.query_start_loc_list
        if starts is None:
            raise ValueError("an encoder needs the starts of its prompts on the host")
        if [end - start for start, end in pairwise(starts)] != self.seq_lens_list:
            raise ValueError("an encoder computes whole prompts, since its tokens attend to later ones too")
        return starts

    def with_groups(self, tables: Sequence[GroupTables], layer_to_group: tuple[int | None, ...]) -> AttentionMetadata:
        """The same step for layers in groups; the tables here are those of the first group."""
        if not layer_to_group:
            return self
        groups = tuple(replace(self, block_tables=own.block_tables, slot_mapping=own.slot_mapping) for own in tables)
        return replace(self, groups=groups, layer_to_group=layer_to_group)

    def with_last_layer(
        self, queries: torch.Tensor, rows: torch.Tensor, query_start_loc: torch.Tensor
    ) -> AttentionMetadata:
        """The same step, of whose tokens only `queries` attend in the last layer: the last ones of each of `rows`.

        `query_start_loc`: Prefix sums of their number by row; int32. The tensors are on a CPU.
        """
        starts, seq_lens = query_start_loc.tolist(), self.seq_lens.index_select(0, rows)
        lengths, block_tables = seq_lens.tolist(), self.block_tables.index_select(0, rows)
        last_layer = replace(
            self, query_start_loc=query_start_loc, seq_lens=seq_lens, block_tables=block_tables,
            query_start_loc_list=starts, seq_lens_list=lengths, queries=queries, groups=(), layer_to_group=(),
            max_query_len=max(end - start for start, end in pairwise(starts)), max_seq_len=max(lengths),
            cross=None if self.cross is None else self.cross.of_queries(queries),
        )  # fmt: skip
        groups = tuple(group.with_last_layer(queries, rows, query_start_loc) for group in self.groups)
        return replace(self, groups=groups, last_layer=last_layer)

    def of_queries(self, states: torch.Tensor) -> torch.Tensor:
        """The states of the tokens that attend; `states` has all tokens."""
        # Indexing with a tensor would start PyTorch's threads, beside those of the kernels, for some thousand elements.
        return states if self.queries is None else states.index_select(0, self.queries)


LayerOutput = tuple[torch.Tensor, torch.Tensor]
"""A decoder layer's output, and the residual that the next norm adds it to: each [num_queries, hidden_size]."""


class LayerStep(NamedTuple):
    """The facts of a step that a layer's call needs, beside its input.

    Attributes:
        kv_cache: What the layer reads and writes.
        metadata: That of the layer's group.
        plans: For the layer's sliding window among others.
    """

    positions: torch.Tensor  # [num_tokens]
    kv_cache: LayerCache
    metadata: AttentionMetadata
    plans: AttentionPlans
