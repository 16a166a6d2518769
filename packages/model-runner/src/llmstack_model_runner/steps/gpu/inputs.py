"""Inputs of a step on a GPU, gathered from rows on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from llmstack_kernels.decode_inputs import FIRST_BLOCK, LAST_TOKEN
from llmstack_kernels.state_rows import StateRows
from llmstack_model_runner.device.staging import Staging
from llmstack_model_runner.layers.attention_metadata import AttentionMetadata, GroupTables
from llmstack_model_runner.layers.step_vectors import StepVectors
from llmstack_model_runner.ragged import IntArray
from llmstack_model_runner.steps.gpu.places import Drafts, Places, lay_out_places
from llmstack_model_runner.steps.input_batch import InputBatch, StepRows
from llmstack_model_runner.steps.prepare_inputs import ModelInputs, StepLayout, lay_out


@dataclass(frozen=True, slots=True)
class DeviceInputs:
    """Tensors of one step, and its places that are sampled."""

    model: ModelInputs
    places: Places


def prepare_device_inputs(
    batch: InputBatch,
    step: StepRows,
    states: Sequence[torch.Tensor],
    staging: Staging,
    vectors: StepVectors | None = None,
) -> DeviceInputs:
    """Sends the layout of a step of at least one row; block tables and last tokens are gathered on the device.

    `states` are those of `DeviceRows` after its `update`. `vectors` stand in place of tokens of the step.
    """
    layout = lay_out(batch, step)
    place_rows, drafts = lay_out_places(batch, step, layout.sampling_indices)
    sent = _send(layout, step, staging, place_rows, drafts)
    last_tokens = states[0][:, LAST_TOKEN].index_select(0, sent.sampling_index)
    sent.token_ids.index_copy_(0, sent.last_known, last_tokens.long())
    max_blocks = -(-int(layout.seq_lens.max()) // batch.block_size)
    tables = [
        GroupTables(state[:, FIRST_BLOCK : FIRST_BLOCK + max_blocks].index_select(0, sent.rows), slot_mapping)
        for state, slot_mapping in zip(states, sent.slot_mappings, strict=True)
    ]
    metadata = AttentionMetadata(
        query_start_loc=sent.query_start_loc,
        seq_lens=sent.seq_lens,
        block_tables=tables[0].block_tables,
        slot_mapping=tables[0].slot_mapping,
        query_start_loc_list=layout.query_start_loc.tolist(),
        seq_lens_list=layout.seq_lens.tolist(),
        max_query_len=int(step.num_scheduled_tokens.max()),
        max_seq_len=int(layout.seq_lens.max()),
        states=sent.states,
        vectors=vectors,
    )
    model = ModelInputs(
        token_ids=sent.token_ids,
        positions=sent.positions,
        attention_metadata=metadata.with_groups(tables, batch.layer_to_group),
        logits_indices=sent.logits_indices,
        sampling_indices=layout.sampling_indices,
        query_start_loc=layout.query_start_loc,
        token_types=None if layout.token_types is None else sent.token_types,
    )
    return DeviceInputs(model, Places(place_rows, sent.place_rows, None if drafts is None else sent.drafts))


class _Sent(NamedTuple):
    """The layout of a step on the device, in the order in which it is sent; see `StepLayout`.

    Attributes:
        rows: The row of each request in the batch, as an index of tensors; `sampling_index` are those that sample.
        place_rows: The row of each place; `drafts` is of the same places, and empty without drafts.
        slot_mappings: One per group of layers.
        states: Of a model with states of layers.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    logits_indices: torch.Tensor
    rows: torch.Tensor
    sampling_index: torch.Tensor
    last_known: torch.Tensor
    place_rows: torch.Tensor
    drafts: torch.Tensor
    token_types: torch.Tensor
    slot_mappings: Sequence[torch.Tensor]
    states: StateRows | None


def _send(layout: StepLayout, step: StepRows, staging: Staging, place_rows: IntArray, drafts: Drafts | None) -> _Sent:
    """Sends the arrays of a step in one copy."""
    arrays: list[npt.NDArray[Any]] = [
        layout.token_ids,
        layout.positions,
        layout.query_start_loc.astype(np.int32),
        layout.seq_lens.astype(np.int32),
        layout.logits_indices,
        step.rows,
        step.rows[layout.sampling_indices],
        layout.last_known,
        place_rows.astype(np.int32),
        layout.positions[:0] if drafts is None else drafts,
        layout.positions[:0] if layout.token_types is None else layout.token_types,
        *layout.slot_mappings,
        *([] if step.states is None else (*step.states.T, step.num_scheduled_tokens - step.num_drafts)),
    ]
    sent, num_single = staging.send(arrays), len(_Sent._fields) - 2
    single, mappings, states = _Sent._make((*sent[:num_single], [], None)), sent[num_single:], None
    if step.states is not None:
        *mappings, sources, targets, num_known_tokens = mappings
        states = StateRows(single.query_start_loc, sources, targets, num_known_tokens)
    return single._replace(slot_mappings=mappings, states=states)
