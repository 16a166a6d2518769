"""Drafts by the heads of Medusa, all from one hidden state."""

from __future__ import annotations

import numpy as np
import torch

from llmstack_kernels.argmax import argmax
from llmstack_model_runner.drafts.last_states import LastStates
from llmstack_model_runner.drafts.maker import DraftMaker
from llmstack_model_runner.models.medusa import MedusaHeads
from llmstack_model_runner.ragged import IntArray
from llmstack_model_runner.steps.input_batch import InputBatch, StepRows
from llmstack_types import KVCacheSpec, ModelRunnerConfig


class DraftsByMedusa(DraftMaker):
    """The heads read the state of the last place whose next token is known, and keep nothing else."""

    def __init__(self, heads: MedusaHeads, head_bytes: int, spec: KVCacheSpec, config: ModelRunnerConfig) -> None:
        """`spec` and `config` are those of the served model."""
        self._heads, self._head_bytes, self._spec, self._config = heads, head_bytes, spec, config
        self._batch: InputBatch | None = None
        self._last: LastStates | None = None

    @property
    def bytes_per_block(self) -> int:
        """None: there are no keys and values."""
        return 0

    def cost(self, weight_bytes: int) -> float:
        """The bytes of one head over those of the served model."""
        return self._head_bytes / self._heads.num_heads / max(weight_bytes, 1)

    def allocate(self, batch: InputBatch, group: int, num_blocks: int, device: torch.device) -> None:
        """Allocates hidden states of the rows."""
        dtype = getattr(torch, self._spec.dtype)
        self._last = LastStates(batch, self._config.max_num_drafts, self._heads.size, dtype, device)
        self._batch, batch.on_hidden = batch, self._take_hidden

    def release(self) -> None:
        """Frees what `allocate` made, which may follow."""
        self._batch = self._last = None

    @torch.inference_mode()
    def make(self, rows: IntArray, wanted: IntArray) -> IntArray:
        """The likeliest token of each head, as many as there are heads at most."""
        drafts = np.full((len(rows), int(wanted.max())), -1, dtype=np.int64)
        batch, last = self._batch, self._last
        if batch is None or last is None:
            return drafts
        num_known = batch.num_tokens[rows]
        places = num_known - 2 - last.starts[rows]
        is_ready = last.are_of(rows) & (places >= 0) & (places < last.counts[rows])
        lengths = np.where(is_ready, np.minimum(wanted, self._heads.num_heads), 0)
        for number in range(int(lengths.max())):
            left = np.flatnonzero(lengths > number)
            logits = self._heads.guess(number, last.at(rows[left], places[left]))
            drafts[left, number] = argmax(logits)[1].cpu().numpy()
            batch.token_ids[rows[left], num_known[left] + number] = drafts[left, number]
        return drafts

    def _take_hidden(self, step: StepRows, hidden: torch.Tensor) -> None:
        if self._last is not None:
            self._last.begin(step.rows)
            self._last.take(step, hidden)
