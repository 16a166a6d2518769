"""The draft tokens of a step, made by a model before the step is computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from llmstack_model_runner.drafts.draft_model import DraftModel, load_draft_model
from llmstack_model_runner.drafts.written_tokens import WrittenTokens
from llmstack_model_runner.layers.sharding import Sharding
from llmstack_model_runner.ragged import IntArray
from llmstack_model_runner.steps.computation import MakeTokenMasks
from llmstack_model_runner.steps.input_batch import InputBatch, StepRows
from llmstack_types import KVCacheSpec, ModelRunnerConfig, SchedulerOutput
from llmstack_types import MakeTokenMasks as MakeMasksWithDrafts


class Drafts:
    """Fills the drafts of a step in; without a model it leaves every step as it is.

    The first of the ranks that share every layer has the draft model, and tells the others what it has guessed.
    """

    def __init__(
        self,
        config: ModelRunnerConfig,
        device: torch.device,
        sharding: Sharding,
        model: DraftModel | None = None,
    ) -> None:
        """`model` is None where another rank has it, or where there is none."""
        self._config, self._device, self._sharding = config, device, sharding
        self._model = model
        self._batch: InputBatch | None = None
        self._written: WrittenTokens | None = None

    def without_weights(self) -> Drafts:
        """The same before the weights are read."""
        return Drafts(self._config, self._device, self._sharding)

    def beside(self, spec: KVCacheSpec, weight_bytes: int) -> KVCacheSpec:
        """The spec of the served model with what its draft model needs; `weight_bytes` are those of the served one.

        Raises:
            ValueError: Its drafts would be of no use to that model; the message is one sentence.
        """
        model = self._model
        if not self._config.draft_model_path:
            return spec
        if not spec.is_generative or (spec.media is not None and spec.media.has_cross_attention):
            raise ValueError("a draft model needs a served model that continues text")
        _whole_context(spec)
        if model is None:
            return spec
        if model.spec.vocab_size != spec.vocab_size:
            raise ValueError(
                f"the draft model has a vocabulary of {model.spec.vocab_size} tokens, and the served one of "
                f"{spec.vocab_size}; drafts need the same"
            )
        size = model.bytes_per_block
        return replace(
            spec, bytes_per_block=spec.bytes_per_block + size, draft_bytes_per_block=size,
            draft_cost=model.weight_bytes * self._sharding.size / max(weight_bytes, 1),
        )  # fmt: skip

    def allocate(self, batch: InputBatch, spec: KVCacheSpec, num_blocks: int) -> None:
        """Allocates the draft model's storage of so many blocks for the rows of a batch."""
        if not self._config.draft_model_path:
            return
        self._batch, group = batch, _whole_context(spec)
        if self._model is not None:
            self._written = WrittenTokens(batch, group, num_blocks, self._config.max_num_drafts)
            self._model.allocate(batch, group, num_blocks, self._device)

    def release(self) -> None:
        """Frees the draft model's storage; `allocate` may follow."""
        self._batch = self._written = None
        if self._model is not None:
            self._model.release()

    def forget_blocks(self, block_ids: Sequence[int]) -> None:
        """Blocks were written from elsewhere."""
        if self._written is not None:
            self._written.forget(list(block_ids))

    def run_largest(self) -> None:
        """Computes the step that needs the most memory, with a storage that few blocks suffice for."""
        if self._model is not None and self._batch is not None:
            num_tokens = self._config.max_num_batched_tokens
            num_rows = min(len(self._batch.num_tokens), num_tokens)
            counts = np.full(num_rows, min(max(num_tokens // num_rows, 1), self._model.max_model_len))
            self._model.next_tokens(np.arange(num_rows), np.zeros(num_rows, dtype=np.int64), counts)

    def fill(
        self, scheduled: SchedulerOutput, step: StepRows, token_masks: MakeMasksWithDrafts | None
    ) -> tuple[StepRows, MakeTokenMasks | None]:
        """The step with its drafts in the batch, and what makes the masks for them.

        Rows that no draft could be made for have fewer, or none. The batch has the rows of the step already.
        """
        if self._batch is None:
            return step, token_masks
        if self._written is not None:
            self._written.follow(scheduled, step)
        if not step.has_drafts:
            return step, token_masks
        indices = np.flatnonzero(step.num_drafts)
        drafts = self._agree(self._make(step.rows[indices], step.num_drafts[indices]))
        num_made = (drafts >= 0).sum(axis=1)
        self._place(step.rows[indices], drafts, num_made)
        num_missing = np.zeros_like(step.num_drafts)
        num_missing[indices] = step.num_drafts[indices] - num_made
        filled = replace(
            step, num_drafts=step.num_drafts - num_missing,
            num_scheduled_tokens=step.num_scheduled_tokens - num_missing,
            num_tokens=step.num_tokens - int(num_missing.sum()),
        )  # fmt: skip
        if token_masks is None:
            return filled, None
        made = zip(indices.tolist(), drafts.tolist(), num_made.tolist(), strict=True)
        drafts_made = {step.request_ids[index]: token_ids[:count] for index, token_ids, count in made}
        return filled, partial(token_masks, drafts_made)

    def _make(self, rows: IntArray, wanted: IntArray) -> IntArray:
        """The drafts of each row, -1 where there is none: [num_rows, most wanted]."""
        drafts = np.full((len(rows), int(wanted.max())), -1, dtype=np.int64)
        model, batch, written = self._model, self._batch, self._written
        if model is None or batch is None or written is None:
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

    def _agree(self, drafts: IntArray) -> IntArray:
        """The drafts of the rank that has the draft model, which all ranks verify."""
        if self._sharding.size == 1:
            return drafts
        shared = torch.from_numpy(drafts + 1 if self._model is not None else np.zeros_like(drafts))
        summed = self._sharding.all_reduce(shared.to(torch.float32).to(self._device))  # exact below 2**24
        agreed: IntArray = summed.to("cpu", torch.int64).numpy() - 1
        return agreed

    def _place(self, rows: IntArray, drafts: IntArray, num_made: IntArray) -> None:
        if self._model is not None or self._batch is None:
            return
        for place in range(drafts.shape[1]):
            own = num_made > place
            self._batch.token_ids[rows[own], self._batch.num_tokens[rows[own]] + place] = drafts[own, place]


def load_drafts(config: ModelRunnerConfig, device: torch.device, sharding: Sharding) -> Drafts:
    """Reads the draft model, if there is one and this rank has it.

    Raises:
        ModelFilesError, ValueError, EngineStartError: As `load_draft_model`.
    """
    is_here = bool(config.draft_model_path) and sharding.rank == 0
    return Drafts(config, device, sharding, load_draft_model(config, device) if is_here else None)


def _whole_context(spec: KVCacheSpec) -> int:
    """The group of layers whose block tables keep the whole context.

    Raises:
        ValueError: There is none.
    """
    windows = [group.sliding_window for group in spec.kv_groups] or [None]
    if None not in windows:
        raise ValueError(
            "all layers of the served model have a sliding window, and a draft model needs all blocks: start with "
            "--disable-hybrid-kv-cache-manager"
        )
    return windows.index(None)
