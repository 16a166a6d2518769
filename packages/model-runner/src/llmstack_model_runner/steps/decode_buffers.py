"""Input buffers of a captured decode step, filled again by each step."""

from __future__ import annotations

import numpy as np
import torch

from llmstack_kernels.state_rows import StateRows
from llmstack_model_runner.layers.attention_metadata import AttentionMetadata, GroupTables
from llmstack_model_runner.media.cross_store import CrossStore
from llmstack_model_runner.steps.input_batch import InputBatch, StepRows
from llmstack_model_runner.steps.prepare_inputs import ModelInputs


class DecodeBuffers:
    """Inputs of a step in which each row computes its last token; `prepare_inputs` makes the same for any step.

    A step makes some 15 calls of numpy in place of 60 of numpy and PyTorch. Each takes 2 to 5 µs after the weights
    have passed through the caches.

    Attributes:
        inputs: The tensors, whose memory never changes. Lists in it only state that every row has one token.
    """

    def __init__(self, batch: InputBatch, num_rows: int, max_num_blocks: int, cross: CrossStore | None = None) -> None:
        """`max_num_blocks`: Length of the longest block table. `cross` has what rows attend to across."""
        ones = torch.ones(num_rows, dtype=torch.int64)
        query_start_loc = torch.arange(num_rows + 1, dtype=torch.int32)
        tables = [
            GroupTables(torch.zeros(num_rows, max_num_blocks, dtype=torch.int32), ones.clone())
            for _ in batch.block_tables
        ]
        sources, targets = torch.zeros_like(ones), torch.zeros_like(ones)
        metadata = AttentionMetadata(
            query_start_loc=query_start_loc,
            seq_lens=ones.int(),
            block_tables=tables[0].block_tables,
            slot_mapping=tables[0].slot_mapping,
            query_start_loc_list=query_start_loc.tolist(),
            seq_lens_list=ones.tolist(),
            max_query_len=1,
            max_seq_len=1,
            states=StateRows(query_start_loc, sources, targets, ones) if batch.has_states else None,
            cross=None if cross is None else cross.rows(np.zeros(num_rows, dtype=np.int64)),
        )
        self._cross = cross
        self.inputs = ModelInputs(
            token_ids=ones.clone(),
            positions=ones.clone(),
            attention_metadata=metadata.with_groups(tables, batch.layer_to_group),
            logits_indices=ones,
            sampling_indices=ones.numpy(),
            query_start_loc=query_start_loc.numpy(),
        )
        # The same memory: calls of numpy take less time than PyTorch's.
        self._token_ids = self.inputs.token_ids.numpy()
        self._positions = self.inputs.positions.numpy()
        self._seq_lens = metadata.seq_lens.numpy()
        self._states = sources.numpy(), targets.numpy()
        self._tables = [(own.block_tables.numpy(), own.slot_mapping.numpy()) for own in tables]

    def fill(self, batch: InputBatch, step: StepRows) -> None:
        """Writes the tokens, positions, block tables and states of a step's rows.

        Block ids beyond a context are arbitrary.
        """
        rows, positions, own = step.rows, step.num_computed_tokens, self.inputs.attention_metadata
        self._token_ids[:] = batch.token_ids[rows, positions]
        self._positions[:] = batch.moved.of_tokens(rows, positions)
        np.add(positions, 1, out=self._seq_lens, casting="same_kind")
        if step.states is not None:
            for states, column in zip(self._states, step.states.T, strict=True):
                states[:] = column
        if self._cross is not None and own.cross is not None and step.places is not None:
            self._cross.fill(own.cross, step.places)
        block_indices, offsets = np.divmod(positions, batch.block_size)
        num_blocks = int(block_indices.max()) + 1
        for tables, (own_tables, slot_mapping) in zip(batch.block_tables, self._tables, strict=True):
            own_tables[:, :num_blocks] = tables[rows, :num_blocks]
            np.multiply(tables[rows, block_indices], batch.block_size, out=slot_mapping)
            slot_mapping += offsets
