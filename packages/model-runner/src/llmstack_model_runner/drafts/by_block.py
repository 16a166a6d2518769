"""Drafts by DFlash's head, a block of them at once."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from llmstack_kernels.argmax import argmax
from llmstack_model_runner.drafts.maker import DraftMaker, OwnBlocks
from llmstack_model_runner.models import CausalLM
from llmstack_model_runner.models.dflash import DFlashHead
from llmstack_model_runner.models.kv_spec import KVCaches
from llmstack_model_runner.ragged import IntArray, ragged_aranges
from llmstack_model_runner.steps.input_batch import InputBatch, StepRows
from llmstack_model_runner.steps.prepare_inputs import lay_out, prepare_inputs
from llmstack_types import KVCacheSpec, ModelRunnerConfig


@dataclass(slots=True)
class _Rows:
    """The rows of a batch, the same with one block table, and the head's keys and values."""

    batch: InputBatch
    view: InputBatch
    kv_caches: KVCaches


class DraftsByBlock(DraftMaker):
    """Drafts of a whole block in one pass of the head.

    The head has keys and values of its own under the served model's block ids, written within each step for all of its
    places. Those of a block of guesses take the slots of the same places, and the step that verifies the guesses writes
    its own over them. After a swap they are of another content; that costs accepted drafts and changes no text.
    """

    def __init__(
        self, head: DFlashHead, head_bytes: int, model: CausalLM, spec: KVCacheSpec, config: ModelRunnerConfig
    ) -> None:
        """`spec` and `config` are those of the served model. Raises ValueError if it does not give what is read."""
        model.keep_states(head.kept_layers)
        self._head, self._head_bytes, self._model = head, head_bytes, model
        self._blocks = OwnBlocks(head.kv_spec.layers, spec)
        self._config, self._device = config, torch.device(spec.device)
        self._rows: _Rows | None = None

    @property
    def bytes_per_block(self) -> int:
        """Bytes of the head's keys and values of one block."""
        return self._blocks.bytes_per_block

    def cost(self, weight_bytes: int) -> float:
        """The head's bytes over those of the served model, shared out among the drafts that it makes at once."""
        num_drafts = max(1, min(self._head.num_drafts, self._config.max_num_drafts))
        return self._head_bytes / num_drafts / max(weight_bytes, 1)

    def allocate(self, batch: InputBatch, group: int, num_blocks: int, device: torch.device) -> None:
        """Allocates keys and values of so many blocks."""
        self._head.rotary.hold_positions(min(self._config.max_model_len, num_blocks * batch.block_size))
        self._rows = _Rows(batch, batch.for_drafts(group), self._blocks.allocate(num_blocks, device))
        batch.on_hidden = self._take_hidden

    def release(self) -> None:
        """Frees what `allocate` made, which may follow."""
        self._rows = None

    @torch.inference_mode()
    def make(self, rows: IntArray, wanted: IntArray) -> IntArray:
        """Guesses the places behind the last token of each row together."""
        drafts = np.full((len(rows), int(wanted.max())), -1, dtype=np.int64)
        own = self._rows
        if own is None:
            return drafts
        num_known = own.batch.num_tokens[rows]
        longest = self._config.draft_max_model_len or self._config.max_model_len
        lengths = np.clip(longest - num_known, 0, np.minimum(wanted, self._head.num_drafts))
        some = np.flatnonzero(lengths)
        if len(some):
            places = ragged_aranges(np.zeros_like(some), lengths[some])
            found = self._guess(own, rows[some], num_known[some] - 1, lengths[some] + 1)
            of_rows = np.repeat(some, lengths[some])
            drafts[of_rows, places] = found
            own.batch.token_ids[rows[of_rows], num_known[of_rows] + places] = found
        return drafts

    def _guess(self, own: _Rows, rows: IntArray, starts: IntArray, counts: IntArray) -> IntArray:
        """The likeliest tokens of places [start + 1, start + count) of each row, whose tokens are known to `start`."""
        laid_out = lay_out(own.view, _step_of(rows, starts, counts))
        # Each place is a row that decodes the last one of its block, so that it sees them all.
        ends = np.repeat(starts + counts - 1, counts)
        inputs = prepare_inputs(own.view, _step_of(np.repeat(rows, counts), ends, np.ones_like(ends)), self._device)
        slots = self._to_device(laid_out.slot_mappings[0])
        metadata = replace(inputs.attention_metadata, slot_mapping=slots)
        token_ids = np.full(len(ends), self._head.mask_token_id, dtype=np.int64)
        firsts = np.cumsum(counts) - counts
        token_ids[firsts] = own.batch.token_ids[rows, starts]
        guessed = np.delete(np.arange(len(ends)), firsts)
        logits = self._head.guess(
            self._model, self._to_device(token_ids), self._to_device(laid_out.positions), metadata, own.kv_caches,
            self._to_device(guessed),
        )  # fmt: skip
        found: IntArray = argmax(logits)[1].cpu().numpy().astype(np.int64)
        return found

    @torch.inference_mode()
    def _take_hidden(self, step: StepRows, hidden: torch.Tensor) -> None:
        own = self._rows
        if own is None:
            return
        laid_out = lay_out(own.view, step)
        positions, slots = self._to_device(laid_out.positions), self._to_device(laid_out.slot_mappings[0])
        self._head.read_places(self._model, positions, slots, own.kv_caches)

    def _to_device(self, array: IntArray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)


def _step_of(rows: IntArray, starts: IntArray, counts: IntArray) -> StepRows:
    none = np.zeros_like(counts)
    return StepRows([""] * len(rows), rows, starts, counts, none, none, int(counts.sum()))
