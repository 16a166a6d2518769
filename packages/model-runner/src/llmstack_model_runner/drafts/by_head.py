"""Drafts by a draft head, from hidden states of the served model."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from llmstack_model_runner.drafts.guesser import Guesser
from llmstack_model_runner.drafts.last_states import LastStates
from llmstack_model_runner.drafts.maker import DraftMaker, OwnBlocks
from llmstack_model_runner.models.kv_spec import KVCaches
from llmstack_model_runner.ragged import IntArray, ragged_aranges
from llmstack_model_runner.steps.input_batch import InputBatch, StepRows
from llmstack_model_runner.steps.prepare_inputs import prepare_inputs
from llmstack_types import KVCacheSpec, ModelRunnerConfig, SchedulerOutput


@dataclass(slots=True)
class _Rows:
    """The rows of a batch, and what is kept of each.

    Attributes:
        batch: That of the served model.
        view: The same rows with one block table.
        last: States of the last places.
        num_done: Leading places of each row that the head has computed.
    """

    batch: InputBatch
    view: InputBatch
    kv_caches: KVCaches
    last: LastStates
    num_done: IntArray


class DraftsByHead(DraftMaker):
    """Drafts one after the other, each from the state of the last.

    The head computes a place once the hidden state there and the token behind it are known: most places of a prompt
    within the step that computes them, and the last ones before the next step. It has keys and values of its own under
    the served model's block ids. Where a request begins with blocks that it has found, those of their last place are
    of the token that followed in the other request; so they are after a swap, of another content. That costs accepted
    drafts and changes no text.
    """

    def __init__(self, guesser: Guesser, spec: KVCacheSpec, config: ModelRunnerConfig) -> None:
        """`spec` and `config` are those of the served model."""
        self._blocks = OwnBlocks(guesser.layers, spec)
        self._guesser, self._spec, self._config = guesser, spec, config
        self._rows: _Rows | None = None

    @property
    def bytes_per_block(self) -> int:
        """Bytes of the head's keys and values of one block."""
        return self._blocks.bytes_per_block

    def cost(self, weight_bytes: int) -> float:
        """The cost of the layers, without the output head."""
        return self._guesser.cost(weight_bytes)

    def allocate(self, batch: InputBatch, group: int, num_blocks: int, device: torch.device) -> None:
        """Allocates keys and values of so many blocks, and states of the rows."""
        config, guesser = self._config, self._guesser
        guesser.hold_positions(min(config.max_model_len, num_blocks * batch.block_size))
        dtype = getattr(torch, self._spec.dtype)
        self._rows = _Rows(
            batch, batch.for_drafts(group), self._blocks.allocate(num_blocks, device),
            LastStates(batch, config.max_num_drafts, guesser.state_size, dtype, device),
            np.zeros(len(batch.num_tokens), dtype=np.int64),
        )  # fmt: skip
        if guesser.has_moved_positions:
            self._rows.view.moved = batch.moved
        batch.on_hidden = self._take_hidden

    def release(self) -> None:
        """Frees what `allocate` made, which may follow."""
        self._rows = None

    @torch.inference_mode()
    def follow(self, scheduled: SchedulerOutput, step: StepRows) -> None:
        """Computes the last places of the step's rows, as far as the tokens behind them are known by now."""
        own = self._rows
        if own is None or not len(step.rows):
            return
        last, rows = own.last, step.rows[own.last.are_of(step.rows)]
        rows = rows[last.counts[rows] > 0]
        counts = np.minimum(last.counts[rows], own.batch.num_tokens[rows] - 1 - last.starts[rows])
        rows, counts = rows[counts > 0], counts[counts > 0]
        if not len(rows):
            return
        starts = last.starts[rows]
        states = last.at(np.repeat(rows, counts), ragged_aranges(np.zeros_like(counts), counts))
        states = self._compute(own, rows, starts, counts, states)
        # The last output takes the place of a state for the first draft.
        last.states[last.to_device(rows), 0] = states[last.to_device(np.cumsum(counts) - 1)]
        last.counts[rows], own.num_done[rows] = 0, starts + counts

    @torch.inference_mode()
    def make(self, rows: IntArray, wanted: IntArray) -> IntArray:
        """Guesses one token after the other; rows whose last place is not computed have none."""
        drafts = np.full((len(rows), int(wanted.max())), -1, dtype=np.int64)
        own = self._rows
        if own is None:
            return drafts
        batch, last, num_known = own.batch, own.last, own.batch.num_tokens[rows]
        longest = self._config.draft_max_model_len or self._config.max_model_len
        is_ready = last.are_of(rows) & (own.num_done[rows] == num_known - 1)
        lengths = np.where(is_ready, np.clip(longest - num_known, 0, wanted), 0)
        states = last.at(rows, np.zeros_like(rows))
        for place in range(drafts.shape[1]):
            left = np.flatnonzero(lengths > place)
            if not len(left):
                break
            chosen, index = rows[left], last.to_device(left)
            if place:
                ones = np.ones_like(chosen)
                further = self._compute(own, chosen, num_known[left] - 2 + place, ones, states[index])
                states = states.index_copy(0, index, further)
            drafts[left, place] = self._guesser.guess(states[index]).cpu().numpy()
            batch.token_ids[chosen, num_known[left] + place] = drafts[left, place]
        return drafts

    @torch.inference_mode()
    def _take_hidden(self, step: StepRows, hidden: torch.Tensor) -> None:
        """Computes the places of a step whose next tokens are known, and keeps the states of the others."""
        own = self._rows
        if own is None:
            return
        states = self._guesser.read_states(hidden)
        rows, starts = step.rows, step.num_computed_tokens
        own.num_done[own.last.begin(rows)] = 0
        offsets = np.cumsum(step.num_scheduled_tokens) - step.num_scheduled_tokens
        num_open = np.where(step.num_left == 0, step.num_drafts + 1, 0)
        # Where states are computed again, so are places that the head has done.
        first = np.maximum(starts, own.num_done[rows])
        ends = starts + step.num_scheduled_tokens - num_open
        counts = np.maximum(ends - first, 0)
        some = np.flatnonzero(counts)
        if len(some):
            index = own.last.to_device(ragged_aranges((offsets + first - starts)[some], counts[some]))
            self._compute(own, rows[some], first[some], counts[some], states[index])
            own.num_done[rows[some]] = ends[some]
        own.last.take(step, states)

    def _compute(
        self, own: _Rows, rows: IntArray, starts: IntArray, counts: IntArray, states: torch.Tensor
    ) -> torch.Tensor:
        """The head's output at places [start, start + count) of each row, from the states there."""
        none = np.zeros_like(counts)
        step = StepRows([""] * len(rows), rows, starts, counts, none, none, int(counts.sum()))
        inputs = prepare_inputs(own.view, step, torch.device(self._spec.device))
        following = own.batch.token_ids[np.repeat(rows, counts), ragged_aranges(starts + 1, counts)]
        token_ids = own.last.to_device(following.astype(np.int64))
        return self._guesser.advance(token_ids, states, inputs.positions, inputs.attention_metadata, own.kv_caches)
