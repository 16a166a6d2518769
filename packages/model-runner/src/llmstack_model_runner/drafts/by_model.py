"""Drafts by a separate model, which computes missing tokens before it guesses."""

from __future__ import annotations

import numpy as np
import torch

from llmstack_model_runner.drafts.draft_model import DraftModel
from llmstack_model_runner.drafts.maker import DraftMaker
from llmstack_model_runner.drafts.written_tokens import WrittenTokens
from llmstack_model_runner.ragged import IntArray
from llmstack_model_runner.steps.input_batch import InputBatch, StepRows
from llmstack_types import KVCacheSpec, ModelRunnerConfig, SchedulerOutput


class DraftsByModel(DraftMaker):
    """A `DraftModel`, with what that has computed of each row and block."""

    def __init__(self, model: DraftModel, config: ModelRunnerConfig) -> None:
        """`config` is that of the served model."""
        self._model, self._config = model, config
        self._batch: InputBatch | None = None
        self._written: WrittenTokens | None = None

    @property
    def bytes_per_block(self) -> int:
        """Bytes of its keys and values of one block."""
        return self._model.bytes_per_block

    def check(self, spec: KVCacheSpec) -> None:
        """Raises ValueError if the vocabulary is not that of the served model."""
        if self._model.spec.vocab_size != spec.vocab_size:
            raise ValueError(
                f"the draft model has a vocabulary of {self._model.spec.vocab_size} tokens, and the served one of "
                f"{spec.vocab_size}; drafts need the same"
            )

    def cost(self, weight_bytes: int) -> float:
        """Its bytes over those of the served model."""
        return self._model.weight_bytes / max(weight_bytes, 1)

    def allocate(self, batch: InputBatch, group: int, num_blocks: int, device: torch.device) -> None:
        """Allocates its storage of so many blocks."""
        self._batch = batch
        self._written = WrittenTokens(batch, group, num_blocks, self._config.max_num_drafts)
        self._model.allocate(batch, group, num_blocks, device)

    def release(self) -> None:
        """Frees the storage; `allocate` may follow."""
        self._batch = self._written = None
        self._model.release()

    def follow(self, scheduled: SchedulerOutput, step: StepRows) -> None:
        """Forgets what the step gives other tokens."""
        if self._written is not None:
            self._written.follow(scheduled, step)

    def forget_blocks(self, block_ids: list[int]) -> None:
        """Blocks were written from elsewhere."""
        if self._written is not None:
            self._written.forget(block_ids)

    def run_largest(self) -> None:
        """Computes the step that needs the most memory, with a storage that few blocks suffice for."""
        if self._batch is not None:
            num_tokens = self._config.max_num_batched_tokens
            num_rows = min(len(self._batch.num_tokens), num_tokens)
            counts = np.full(num_rows, min(max(num_tokens // num_rows, 1), self._model.max_model_len))
            self._model.next_tokens(np.arange(num_rows), np.zeros(num_rows, dtype=np.int64), counts)

    def make(self, rows: IntArray, wanted: IntArray) -> IntArray:
        """The drafts of each row, -1 where there is none: [num_rows, most wanted]."""
        drafts = np.full((len(rows), int(wanted.max())), -1, dtype=np.int64)
        model, batch, written = self._model, self._batch, self._written
        if batch is None or written is None:
            return drafts
        num_known = batch.num_tokens[rows]
        lengths = np.clip(model.max_model_len - num_known, 0, wanted)
        starts = written.of_rows(rows)
        # No more tokens than a step of the served model may have: the other rows wait meanwhile.
        missing = np.where(lengths > 0, num_known - starts, 0)
        counts = np.clip(self._config.max_num_batched_tokens - (np.cumsum(missing) - missing), 0, missing)
        is_read = counts > 0
        if not is_read.any():
            return drafts
        guessed = np.zeros_like(rows)
        guessed[is_read] = model.next_tokens(rows[is_read], starts[is_read], counts[is_read])
        written.note(rows[is_read], (starts + counts)[is_read])
        lengths[counts < missing] = 0
        for place in range(drafts.shape[1]):
            is_left = lengths > place
            if place and is_left.any():
                own = rows[is_left]
                guessed[is_left] = model.next_tokens(own, num_known[is_left] + place - 1, np.ones_like(own))
            drafts[is_left, place] = guessed[is_left]
            batch.token_ids[rows[is_left], num_known[is_left] + place] = guessed[is_left]
        is_made = lengths > 0
        written.note_guesses(rows[is_made], drafts[is_made], lengths[is_made] - 1)
        return drafts
