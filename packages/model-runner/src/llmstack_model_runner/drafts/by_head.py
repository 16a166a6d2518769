"""Drafts by a draft head, from hidden states of the served model."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from llmstack_kernels.argmax import argmax
from llmstack_kv_cache.storage import allocate_block_storage
from llmstack_model_runner.models import CausalLM
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
        tails: Hidden states of the last places of each row, whose next tokens were not known yet.
        starts: The first of these places.
        num_tails: How many there are.
        num_done: Leading places of each row that the head has computed.
        generations: As in the batch, of the request that all this is of.
    """

    batch: InputBatch
    view: InputBatch
    kv_caches: KVCaches
    tails: torch.Tensor  # [num_rows, 1 + most drafts, hidden_size]
    starts: IntArray
    num_tails: IntArray
    num_done: IntArray
    generations: IntArray


class DraftsByHead:
    """A `DraftMaker`.

    The head computes a place once the hidden state there and the token behind it are known: most places of a prompt
    within the step that computes them, and the last ones before the next step. It has keys and values of its own under
    the served model's block ids. Where a request begins with blocks that it has found, those of their last place are
    of the token that followed in the other request; so they are after a swap, of another content. That costs accepted
    drafts and changes no text.
    """

    def __init__(self, model: CausalLM, spec: KVCacheSpec, config: ModelRunnerConfig) -> None:
        """Raises ValueError if the model has no head."""
        found = model.draft_head_spec()
        if found is None:
            raise ValueError(
                f"the method 'mtp' needs a model with a layer that guesses a further token, as Qwen3-Next, Qwen 3.5 "
                f"and DeepSeek V3 have; {type(model).__name__} has none"
            )
        layer, self._share = found
        self._tensors = layer.block_tensors(spec.block_size, spec.kv_cache_dtype or spec.dtype)
        self._model, self._spec, self._config = model, spec, config
        self._rows: _Rows | None = None

    @property
    def bytes_per_block(self) -> int:
        """Bytes of the head's keys and values of one block."""
        return sum(tensor.num_bytes for tensor in self._tensors)

    def check(self, spec: KVCacheSpec) -> None:
        """Every served model with a head has drafts by it."""

    def cost(self, weight_bytes: int) -> float:
        """The head's weights over those of the served model, as if both had the same precision."""
        return self._share

    def allocate(self, batch: InputBatch, group: int, num_blocks: int, device: torch.device) -> None:
        """Allocates keys and values of so many blocks, and hidden states of the rows."""
        num_rows, size = len(batch.num_tokens), self._model.vector_size or 0
        layer = [(tensor.shape, getattr(torch, tensor.dtype)) for tensor in self._tensors]
        shape = (num_rows, 1 + self._config.max_num_drafts, size)
        none = np.zeros(num_rows, dtype=np.int64)
        self._rows = _Rows(
            batch, batch.for_drafts(group), list(allocate_block_storage([layer], num_blocks, device)),
            torch.zeros(shape, dtype=getattr(torch, self._spec.dtype), device=device),
            none.copy(), none.copy(), none.copy(), none - 1,
        )  # fmt: skip
        self._rows.view.moved = batch.moved  # the head's positions are the model's
        batch.on_hidden = self._take_hidden

    def release(self) -> None:
        """Frees what `allocate` made, which may follow."""
        self._rows = None

    def forget_blocks(self, block_ids: list[int]) -> None:
        """Blocks from elsewhere have nothing of the head; see the class."""

    def run_largest(self) -> None:
        """Does nothing: the largest steps of the served model have computed the head's part too."""

    @torch.inference_mode()
    def follow(self, scheduled: SchedulerOutput, step: StepRows) -> None:
        """Computes the last places of the step's rows, as far as the tokens behind them are known by now."""
        own = self._rows
        if own is None or not len(step.rows):
            return
        rows = step.rows[(own.generations[step.rows] == own.batch.generations[step.rows])]
        rows = rows[own.num_tails[rows] > 0]
        counts = np.minimum(own.num_tails[rows], own.batch.num_tokens[rows] - 1 - own.starts[rows])
        rows, counts = rows[counts > 0], counts[counts > 0]
        if not len(rows):
            return
        starts = own.starts[rows]
        index = (
            self._to_device(np.repeat(rows, counts)),
            self._to_device(ragged_aranges(np.zeros_like(counts), counts)),
        )
        hidden = self._compute(own, rows, starts, counts, own.tails[index])
        # The last output takes the place of a hidden state for the first draft.
        own.tails[self._to_device(rows), 0] = hidden[self._to_device(np.cumsum(counts) - 1)]
        own.num_tails[rows], own.num_done[rows] = 0, starts + counts

    @torch.inference_mode()
    def make(self, rows: IntArray, wanted: IntArray) -> IntArray:
        """Guesses one token after the other; rows whose last place is not computed have none."""
        drafts = np.full((len(rows), int(wanted.max())), -1, dtype=np.int64)
        own = self._rows
        if own is None:
            return drafts
        batch, num_known = own.batch, own.batch.num_tokens[rows]
        is_ready = (own.generations[rows] == batch.generations[rows]) & (own.num_done[rows] == num_known - 1)
        lengths = np.where(is_ready, wanted, 0)
        hidden = own.tails[self._to_device(rows), 0]
        for place in range(drafts.shape[1]):
            left = np.flatnonzero(lengths > place)
            if not len(left):
                break
            chosen = rows[left]
            if place:
                ones = np.ones_like(chosen)
                last = self._compute(own, chosen, num_known[left] - 2 + place, ones, hidden[self._to_device(left)])
                hidden = hidden.index_copy(0, self._to_device(left), last)
            logits = self._model.compute_logits(hidden[self._to_device(left)])
            drafts[left, place] = argmax(logits)[1].cpu().numpy()
            batch.token_ids[chosen, num_known[left] + place] = drafts[left, place]
        return drafts

    @torch.inference_mode()
    def _take_hidden(self, step: StepRows, hidden: torch.Tensor) -> None:
        """Computes the places of a step whose next tokens are known, and keeps the hidden states of the others."""
        own = self._rows
        if own is None:
            return
        rows, starts = step.rows, step.num_computed_tokens
        is_new = own.generations[rows] != own.batch.generations[rows]
        own.num_done[rows[is_new]] = own.num_tails[rows[is_new]] = 0
        own.generations[rows] = own.batch.generations[rows]
        offsets = np.cumsum(step.num_scheduled_tokens) - step.num_scheduled_tokens
        is_sampling = step.num_left == 0
        num_open = np.where(is_sampling, step.num_drafts + 1, 0)
        # Where states are computed again, so are places that the head has done.
        first = np.maximum(starts, own.num_done[rows])
        ends = starts + step.num_scheduled_tokens - num_open
        counts = np.maximum(ends - first, 0)
        some = np.flatnonzero(counts)
        if len(some):
            index = ragged_aranges((offsets + first - starts)[some], counts[some])
            self._compute(own, rows[some], first[some], counts[some], hidden[self._to_device(index)])
            own.num_done[rows[some]] = ends[some]
        last = np.flatnonzero(is_sampling)
        if len(last):
            count = num_open[last]
            index = ragged_aranges((offsets + step.num_scheduled_tokens)[last] - count, count)
            places = ragged_aranges(np.zeros_like(count), count)
            target = (self._to_device(np.repeat(rows[last], count)), self._to_device(places))
            own.tails.index_put_(target, hidden[self._to_device(index)])
            own.starts[rows[last]], own.num_tails[rows[last]] = ends[last], count

    def _compute(
        self, own: _Rows, rows: IntArray, starts: IntArray, counts: IntArray, hidden: torch.Tensor
    ) -> torch.Tensor:
        """The head's output at places [start, start + count) of each row, from the hidden states there."""
        none = np.zeros_like(counts)
        step = StepRows([""] * len(rows), rows, starts, counts, none, none, int(counts.sum()))
        inputs = prepare_inputs(own.view, step, torch.device(self._spec.device))
        following = own.batch.token_ids[np.repeat(rows, counts), ragged_aranges(starts + 1, counts)]
        token_ids = self._to_device(following.astype(np.int64))
        return self._model.draft(token_ids, hidden, inputs.positions, inputs.attention_metadata, own.kv_caches)

    def _to_device(self, array: IntArray) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        return tensor if self._spec.device == "cpu" else tensor.to(self._spec.device)
