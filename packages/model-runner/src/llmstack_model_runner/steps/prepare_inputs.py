"""Preparation of inputs: from the rows of a step to the model's flat tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from llmstack_kernels.state_rows import StateRows
from llmstack_model_runner.layers.attention_metadata import AttentionMetadata, CrossRows, GroupTables
from llmstack_model_runner.layers.step_vectors import StepVectors
from llmstack_model_runner.media.cross_store import CrossStore
from llmstack_model_runner.ragged import IntArray, ragged_aranges
from llmstack_model_runner.steps.input_batch import InputBatch, StepRows


@dataclass(frozen=True, slots=True)
class ModelInputs:
    """Tensors of one step, with prefills and decodes concatenated in scheduled order.

    Attributes:
        logits_indices: Flat tokens whose logits are needed: of each sampling row the last known one and the drafts.
        sampling_indices: Rows of the step that sample, ascending; the others are chunks of a prefill.
        token_types: 1 for tokens of the second text of a pair, 0 for all others; None if the batch has no pair.
    """

    token_ids: torch.Tensor  # [num_tokens] int64
    positions: torch.Tensor  # [num_tokens] int64
    attention_metadata: AttentionMetadata
    logits_indices: torch.Tensor  # [num_logits] int64
    sampling_indices: IntArray  # [num_sampling_rows]
    query_start_loc: IntArray  # [num_rows + 1]
    token_types: torch.Tensor | None = None  # [num_tokens] int64


@dataclass(frozen=True, slots=True)
class StepLayout:
    """Layout of a step as host arrays, without block tables.

    Attributes:
        last_known: Flat index of the last known token of each sampling row.
    """

    token_ids: IntArray  # [num_tokens]
    positions: IntArray  # [num_tokens]
    slot_mappings: list[IntArray]  # of each group of layers [num_tokens]
    query_start_loc: IntArray  # [num_rows + 1]
    seq_lens: IntArray  # [num_rows]
    logits_indices: IntArray  # [num_logits]
    sampling_indices: IntArray  # [num_sampling_rows]
    last_known: IntArray  # [num_sampling_rows]
    token_types: IntArray | None  # [num_tokens]


def lay_out(batch: InputBatch, step: StepRows) -> StepLayout:
    """Flattens a step of at least one row.

    A row's tokens have the positions num_computed_tokens, num_computed_tokens + 1, ...; a decode is a row of one token.
    """
    num_scheduled = step.num_scheduled_tokens
    query_start_loc = np.zeros(len(num_scheduled) + 1, dtype=np.int64)
    np.cumsum(num_scheduled, out=query_start_loc[1:])
    positions, row_indices = _flatten(step, query_start_loc)
    token_rows = step.rows[row_indices]
    sampling_indices = find_sampling_rows(batch, step)
    num_logits = step.num_drafts[sampling_indices] + 1
    last_known = query_start_loc[1:][sampling_indices] - num_logits
    return StepLayout(
        token_ids=batch.token_ids[token_rows, positions].astype(np.int64),
        positions=batch.moved.of_tokens(token_rows, positions),
        slot_mappings=_slot_mappings(batch, token_rows, positions),
        query_start_loc=query_start_loc,
        seq_lens=step.num_computed_tokens + num_scheduled,
        logits_indices=ragged_aranges(last_known, num_logits),
        sampling_indices=sampling_indices,
        last_known=last_known,
        token_types=_token_types(batch, token_rows, positions) if batch.pooling.num_pairs else None,
    )


def find_sampling_rows(batch: InputBatch, step: StepRows) -> IntArray:
    """Rows of the step, ascending, that reach their last known token and sample the next one."""
    return np.flatnonzero((step.num_left == 0) & ~batch.pooling.is_pooling[step.rows])


def prepare_inputs(
    batch: InputBatch,
    step: StepRows,
    device: torch.device,
    vectors: StepVectors | None = None,
    cross: CrossStore | None = None,
) -> ModelInputs:
    """Tensors of a step of at least one row whose tokens are all known on the host.

    `vectors` are those that stand in place of tokens of the step; `cross` has what its rows attend to across.
    """
    layout = lay_out(batch, step)
    token_types = layout.token_types
    tables = [
        GroupTables(_to_device(block_tables, device), _to_device(slot_mapping, device))
        for block_tables, slot_mapping in zip(
            _block_tables(batch, step, layout.seq_lens), layout.slot_mappings, strict=True
        )
    ]
    query_start_loc = _to_device(layout.query_start_loc.astype(np.int32), device)
    metadata = AttentionMetadata(
        query_start_loc=query_start_loc,
        seq_lens=_to_device(layout.seq_lens.astype(np.int32), device),
        block_tables=tables[0].block_tables,
        slot_mapping=tables[0].slot_mapping,
        query_start_loc_list=layout.query_start_loc.tolist(),
        seq_lens_list=layout.seq_lens.tolist(),
        max_query_len=int(step.num_scheduled_tokens.max()),
        max_seq_len=int(layout.seq_lens.max()),
        states=None if step.states is None else _state_rows(step, query_start_loc, device),
        vectors=vectors,
        cross=None if cross is None or step.places is None else _cross_rows(batch, step, cross, step.places),
    )
    return ModelInputs(
        token_ids=_to_device(layout.token_ids, device),
        positions=_to_device(layout.positions, device),
        attention_metadata=metadata.with_groups(tables, batch.layer_to_group) if batch.layer_to_group else metadata,
        logits_indices=_to_device(layout.logits_indices, device),
        sampling_indices=layout.sampling_indices,
        query_start_loc=layout.query_start_loc,
        token_types=None if token_types is None else _to_device(token_types, device),
    )


def _state_rows(step: StepRows, query_start_loc: torch.Tensor, device: torch.device) -> StateRows:
    states = np.ascontiguousarray(step.states.T if step.states is not None else [])
    sources, targets, num_known_tokens = (
        _to_device(array, device) for array in (*states, step.num_scheduled_tokens - step.num_drafts)
    )
    return StateRows(query_start_loc, sources, targets, num_known_tokens)


def _cross_rows(batch: InputBatch, step: StepRows, cross: CrossStore, places: IntArray) -> CrossRows:
    """The rows of cross attention, one for each token. Queries are kept for rows that are aligned."""
    rows = cross.rows(np.repeat(places, step.num_scheduled_tokens))
    return rows._replace(queries=[]) if batch.pooling.has_alignments else rows


def _token_types(batch: InputBatch, token_rows: IntArray, positions: IntArray) -> IntArray:
    token_types: IntArray = (positions >= batch.pooling.second_text_start[token_rows]).astype(np.int64)
    return token_types


def _flatten(step: StepRows, query_start_loc: IntArray) -> tuple[IntArray, IntArray]:
    """Position of every token, and its row in the step; both [num_tokens]."""
    num_rows = len(step.rows)
    if int(query_start_loc[-1]) == num_rows:  # Every row decodes.
        return step.num_computed_tokens, np.arange(num_rows)
    positions = ragged_aranges(step.num_computed_tokens, step.num_scheduled_tokens)
    return positions, np.repeat(np.arange(num_rows), step.num_scheduled_tokens)


def _block_tables(batch: InputBatch, step: StepRows, seq_lens: IntArray) -> list[npt.NDArray[np.int32]]:
    """Block ids of each row's context by group, 0 beyond it, where a reused row may have older ids."""
    max_blocks = -(-int(seq_lens.max()) // batch.block_size)
    is_needed = np.arange(max_blocks) * batch.block_size < seq_lens[:, None]
    return [np.where(is_needed, tables[step.rows, :max_blocks], np.int32(0)) for tables in batch.block_tables]


def _slot_mappings(batch: InputBatch, token_rows: IntArray, positions: IntArray) -> list[IntArray]:
    """The slot of each token by group, as `llmstack_kv_cache.slot_mapping` defines it; numpy's calls are faster.

    It is -1, for no write, where others wrote the token's KV, which then other requests read.
    """
    block_indices, offsets = np.divmod(positions, batch.block_size)
    slots = [
        tables[token_rows, block_indices].astype(np.int64) * batch.block_size + offsets for tables in batch.block_tables
    ]
    if batch.has_states:  # else no token is computed whose KV is there
        is_held = positions < batch.num_held_tokens[token_rows]
        for of_group in slots:
            of_group[is_held] = -1
    return slots


def _to_device(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.to(device, non_blocking=True)
