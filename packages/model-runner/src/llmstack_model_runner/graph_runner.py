"""Decode steps of few rows on a CPU, recorded once per number of rows and then repeated natively."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np
import torch

from llmstack_kernels.first_maximum import first_maximum
from llmstack_kernels.native import library
from llmstack_kernels.native.recording import Arena, NotRecordable, Recording, record
from llmstack_model_runner.attention_metadata import AttentionMetadata
from llmstack_model_runner.models.base import CausalLM, KVCaches
from llmstack_model_runner.prepare_inputs import ModelInputs
from llmstack_model_runner.sampling import SamplerOutput

logger = logging.getLogger(__name__)

# More rows take so long that Python between the operations does not count.
_MAX_NUM_ROWS = 32


@dataclass(frozen=True, slots=True)
class DecodeOutput:
    """What a decode step computed; overwritten by the next one."""

    logits: torch.Tensor  # [num_rows, vocab_size] float32
    best: torch.Tensor  # [num_rows] float32: the largest of each row
    best_token_ids: torch.Tensor  # [num_rows] int64: the first that has it

    def greedy_choice(self) -> SamplerOutput:
        """What the sampler gives where every row is greedy and nothing changes its logits.

        After a step has streamed all weights through the caches, each of PyTorch's operations takes some 50 µs.
        """
        return SamplerOutput(self.best_token_ids, torch.from_numpy(np.isfinite(self.best.numpy())))


@dataclass(frozen=True, slots=True)
class _Graph:
    """A recorded step: inputs are written to `inputs`, and a repetition leaves its results in `output`."""

    inputs: ModelInputs
    output: DecodeOutput
    recording: Recording

    def run(self, inputs: ModelInputs) -> DecodeOutput:
        _copy_inputs(inputs, self.inputs)
        self.recording.repeat()
        return self.output


class GraphRunner:
    """Runs the steps it can; the others, and all steps of models that PyTorch has a part in, are left to the caller."""

    def __init__(self, model: CausalLM, kv_caches: KVCaches, max_num_blocks: int) -> None:
        """`max_num_blocks` is the length of the longest block table."""
        self._model = model
        self._kv_caches = kv_caches
        self._max_num_blocks = max_num_blocks
        self._num_rows_to_graph: dict[int, _Graph] = {}
        self._arena = Arena()
        self._reason_for_none = "" if library() is not None else "the native kernels are not built"

    def run(self, inputs: ModelInputs) -> DecodeOutput | None:
        """Runs a step in which each row computes one token and samples; None to decline."""
        num_rows = len(inputs.sampling_indices)
        if self._reason_for_none or len(inputs.token_ids) != num_rows or not 0 < num_rows <= _MAX_NUM_ROWS:
            return None
        graph = self._num_rows_to_graph.get(num_rows)
        if graph is not None:
            return graph.run(inputs)
        try:
            graph = self._record(inputs)
        except NotRecordable as error:
            self._reason_for_none = str(error)
            logger.info("decode steps are not recorded: %s", error)
            return None
        self._num_rows_to_graph[num_rows] = graph
        return graph.output

    def describe(self) -> str:
        """For logs."""
        if self._reason_for_none:
            return f"not recorded: {self._reason_for_none}"
        return f"recorded and repeated natively up to {_MAX_NUM_ROWS} rows"

    def _record(self, inputs: ModelInputs) -> _Graph:
        own = _make_inputs(len(inputs.token_ids), self._max_num_blocks)
        _copy_inputs(inputs, own)
        with record(self._arena) as recording:
            hidden = self._model.forward(own.token_ids, own.positions, own.attention_metadata, self._kv_caches)
            logits = self._model.compute_logits(hidden)
            output = DecodeOutput(logits, *first_maximum(logits))
        return _Graph(own, output, recording)


def _make_inputs(num_rows: int, max_num_blocks: int) -> ModelInputs:
    """Room for the inputs of a decode step; what is a list says no more than that every row has one token."""
    ones = torch.ones(num_rows, dtype=torch.int64)
    query_start_loc = torch.arange(num_rows + 1, dtype=torch.int32)
    return ModelInputs(
        token_ids=ones.clone(),
        positions=ones.clone(),
        attention_metadata=AttentionMetadata(
            query_start_loc=query_start_loc,
            seq_lens=ones.int(),
            block_tables=torch.zeros(num_rows, max_num_blocks, dtype=torch.int32),
            slot_mapping=ones.clone(),
            query_start_loc_list=query_start_loc.tolist(),
            seq_lens_list=ones.tolist(),
            max_query_len=1,
            max_seq_len=1,
        ),
        logits_indices=ones,
        sampling_indices=ones.numpy(),
        query_start_loc=query_start_loc.numpy(),
    )


def _copy_inputs(source: ModelInputs, target: ModelInputs) -> None:
    given, own = source.attention_metadata, target.attention_metadata
    target.token_ids.copy_(source.token_ids)
    target.positions.copy_(source.positions)
    own.seq_lens.copy_(given.seq_lens)
    own.slot_mapping.copy_(given.slot_mapping)
    own.block_tables[:, : given.block_tables.shape[1]].copy_(given.block_tables)
