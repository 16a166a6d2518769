"""Input batch: persistent rows of all requests, updated by each step."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace

import numpy as np
import torch

from llmstack_model_runner.adapters.store import NO_ADAPTER, AdapterStore
from llmstack_model_runner.ragged import IntArray, ragged_aranges
from llmstack_model_runner.sampling import LogitsProcessors, SamplingRows
from llmstack_model_runner.steps.moved_positions import MovedPositions
from llmstack_model_runner.steps.pooling_rows import PoolingRows
from llmstack_types import (
    KVCacheGroupSpec,
    MediaItem,
    NewRequest,
    SamplingParams,
    ScheduledRequest,
    SchedulerOutput,
)
from llmstack_types.scheduler_output import DRAFT_TO_MAKE


class InputBatchError(ValueError):
    """A step is inconsistent with the runner's rows."""


@dataclass(frozen=True, slots=True)
class StepRows:
    """The rows of one step, in scheduled order.

    Attributes:
        rows: Row of each request in the batch's arrays.
        num_computed_tokens: Tokens of each row whose KV exists before the step.
        num_scheduled_tokens: Tokens of each row in this step, drafts included; at least 1.
        num_drafts: Draft tokens of each row, stored in the batch after the known tokens.
        num_left: Known tokens and drafts of each row that are left after the step; rows that sample have none.
        num_tokens: Scheduled tokens of all rows.
        states: State blocks that each row reads and writes; None for a model without states.
        places: Where the keys and values are that each row attends to across; None without cross attention.
    """

    request_ids: list[str]
    rows: IntArray  # [num_rows]
    num_computed_tokens: IntArray  # [num_rows]
    num_scheduled_tokens: IntArray  # [num_rows]
    num_drafts: IntArray  # [num_rows]
    num_left: IntArray  # [num_rows]
    num_tokens: int
    states: IntArray | None = None  # [num_rows, 2]
    places: IntArray | None = None  # [num_rows]

    @property
    def has_drafts(self) -> bool:
        """Whether a row has draft tokens; such a row computes more than one token."""
        return self.num_tokens > len(self.rows) and bool(self.num_drafts.any())

    def split_drafts(self) -> StepRows | None:
        """The same tokens as one row each, all of which decode; None if a row computes more than a token and drafts.

        Each of these rows samples the token of its own place.
        """
        num_tokens = self.num_scheduled_tokens
        if (num_tokens != self.num_drafts + 1).any():
            return None
        num_before = ragged_aranges(np.zeros_like(num_tokens), num_tokens)
        return StepRows(
            request_ids=[self.request_ids[index] for index in np.repeat(np.arange(len(num_tokens)), num_tokens)],
            rows=np.repeat(self.rows, num_tokens),
            num_computed_tokens=np.repeat(self.num_computed_tokens, num_tokens) + num_before,
            num_scheduled_tokens=np.ones_like(num_before),
            num_drafts=num_before,
            num_left=np.repeat(self.num_left, num_tokens),
            num_tokens=self.num_tokens,
            places=None if self.places is None else np.repeat(self.places, num_tokens),
        )


@dataclass(frozen=True, slots=True)
class Reservation:
    """Places of tokens that a step in flight samples: one for each of some rows, as of the start of the step."""

    rows: IntArray  # [num_rows]
    columns: IntArray  # [num_rows]
    generations: IntArray  # [num_rows]


class InputBatch:
    """Persistent rows: tokens, block tables, counts and sampling parameters as arrays.

    A request keeps its row from arrival to removal, and a freed row is reused by the next request, so rows are never
    moved. A step gathers the rows it needs by index. The token array is virtual memory until rows grow into it.

    Attributes:
        block_tables: Block ids of each group of layers, row and block of tokens.
        num_row_blocks: Blocks of tokens that each row's tables reach over.
        group_windows: Sliding window of each group of layers; None for full attention.
        layer_to_group: By layer, its group, None for a layer with a state; empty where all others share a block table.
        num_state_blocks: Blocks of the states of layers that have one; 0 for a model without.
        has_states: Whether there are such layers.
        num_tokens: Number of prompt and output tokens, including those with a reserved place.
        num_held_tokens: Leading tokens of each row whose KV is not written, since others wrote it.
        adapter_numbers: Number of each row's adapter, or `NO_ADAPTER`.
        generations: Incremented when a row gets another request.
        media: Row to the items of its prompt, ascending, each with its number.
        moved: Rows whose positions are not their places, once a step needed them.
        on_hidden: Receives the hidden states of a step's tokens, [num_tokens, hidden_size], if they are of use later.
    """

    def __init__(
        self,
        max_num_rows: int,
        max_model_len: int,
        block_size: int,
        num_blocks: int,
        vocab_size: int,
        logits_processors: LogitsProcessors | None = None,
        groups: Sequence[KVCacheGroupSpec] = (),
        adapters: AdapterStore | None = None,
        num_state_blocks: int = 0,
    ) -> None:
        """Allocates rows for `max_num_rows` requests of up to `max_model_len` tokens.

        `groups` of layers have block tables of their own, but that of layers with a state; without any, all layers
        share one. `adapters` are those that requests may name.
        """
        max_blocks_per_row = -(-max_model_len // block_size) + 1
        self.block_size = block_size
        # One column more than the longest request: a full prompt may sample a token that is then dropped.
        self.token_ids = np.zeros((max_num_rows, max_model_len + 1), dtype=np.int32)
        self.num_tokens = np.zeros(max_num_rows, dtype=np.int64)
        self.num_prompt_tokens = np.zeros(max_num_rows, dtype=np.int64)
        self.num_held_tokens = np.zeros(max_num_rows, dtype=np.int64)
        with_tables = [group for group in groups if group.kind != "state"]
        self.group_windows = tuple(group.sliding_window for group in with_tables) or (None,)
        layer_to_group = {layer: number for number, group in enumerate(with_tables) for layer in group.layers}
        num_layers = sum(len(group.layers) for group in groups)
        self.layer_to_group = tuple(layer_to_group.get(layer) for layer in range(num_layers))
        self.block_tables = np.zeros((len(self.group_windows), max_num_rows, max_blocks_per_row), dtype=np.int32)
        self.num_row_blocks = np.zeros(max_num_rows, dtype=np.int64)
        self.generations = np.zeros(max_num_rows, dtype=np.int64)
        self.adapter_numbers = np.full(max_num_rows, NO_ADAPTER, dtype=np.int64)
        self.row_to_params: dict[int, tuple[SamplingParams, tuple[int, ...]]] = {}  # with end-of-sequence tokens
        self.num_prompt_logprobs: dict[int, int] = {}
        self.media: dict[int, tuple[tuple[int, MediaItem], ...]] = {}
        self.moved = MovedPositions(max_num_rows)
        self.on_hidden: Callable[[StepRows, torch.Tensor], None] | None = None
        self.sampling = SamplingRows(self.token_ids, vocab_size, logits_processors)
        self.pooling = PoolingRows(max_num_rows)
        self._adapters = adapters
        self._max_model_len = max_model_len
        self._num_blocks = num_blocks
        self.num_state_blocks = num_state_blocks
        self.has_states = num_state_blocks > 0
        self._vocab_size = vocab_size
        self._request_id_to_row: dict[str, int] = {}
        # Popped from the end: low rows first.
        self._free_rows = list(range(max_num_rows - 1, -1, -1))

    def __len__(self) -> int:
        return len(self._request_id_to_row)

    def for_drafts(self, group: int) -> InputBatch:
        """The same rows as a draft model sees them: tokens alone, with the block tables of one group."""
        rows = copy(self)
        rows.block_tables = self.block_tables[group : group + 1]
        rows.group_windows, rows.layer_to_group = (None,), ()
        rows.has_states, rows.num_prompt_logprobs, rows.media, rows.on_hidden = False, {}, {}, None
        rows.moved, rows.pooling = MovedPositions(len(self.num_tokens)), PoolingRows(len(self.num_tokens))
        return rows

    def update(self, scheduled: SchedulerOutput) -> StepRows:
        """Applies a step's removals, arrivals and new blocks, in this order.

        Raises:
            InputBatchError: The step contains an unknown request, or needs tokens or blocks that do not exist.
        """
        for request_id in scheduled.removed_request_ids:
            self.remove(request_id)
        for request in scheduled.new_requests:
            self.add(request)
        step = self._schedule(scheduled.scheduled_requests)
        return self._with_states(step, scheduled) if self.has_states else step

    def add(self, request: NewRequest) -> None:
        """Adds a request in a free row.

        Raises:
            InputBatchError: The request does not fit into a row, or no row is free.
        """
        token_ids = self._checked_token_ids(request)
        row = self._free_rows.pop()
        self._request_id_to_row[request.request_id] = row
        self.token_ids[row, : len(token_ids)] = token_ids
        self.num_tokens[row] = len(token_ids)
        self.num_prompt_tokens[row] = request.num_prompt_tokens
        self.num_held_tokens[row] = request.num_held_tokens
        self.num_row_blocks[row] = 0
        self.adapter_numbers[row] = (
            NO_ADAPTER if self._adapters is None else self._adapters.number_of(request.lora_name)
        )
        self.generations[row] += 1
        self.row_to_params[row] = (request.sampling_params, request.eos_token_ids)
        if request.pooling_params is not None:
            self.pooling.set_row(row, request.pooling_params)
        if request.media:
            self.media[row] = request.media
        if request.sampling_params.prompt_logprobs is not None:
            self.num_prompt_logprobs[row] = request.sampling_params.prompt_logprobs
        self.sampling.set_row(
            row, request.sampling_params, token_ids, request.num_prompt_tokens, request.eos_token_ids,
            placeholders=_placeholders(request),
        )  # fmt: skip

    def remove(self, request_id: str) -> None:
        """Frees a request's row.

        Raises:
            InputBatchError: No such request.
        """
        row = self._request_id_to_row.pop(request_id, None)
        if row is None:
            raise InputBatchError(f"request {request_id!r} cannot be removed: the runner has no row for it")
        self.sampling.clear_row(row)
        self.pooling.clear_row(row)
        self.generations[row] += 1
        del self.row_to_params[row]
        self.num_prompt_logprobs.pop(row, None)
        self.media.pop(row, None)
        self.moved.clear_row(row)
        self._free_rows.append(row)

    def append_tokens(self, rows: IntArray, token_ids: IntArray, num_appended: IntArray | None = None) -> None:
        """Appends `num_appended` tokens to each of the rows, which are distinct, in order; one to each if None."""
        columns, token_rows = self.num_tokens[rows], rows
        if num_appended is not None:
            columns, token_rows = ragged_aranges(columns, num_appended), np.repeat(rows, num_appended)
        self.token_ids[token_rows, columns] = token_ids
        self.num_tokens[rows] += 1 if num_appended is None else num_appended
        self.sampling.penalties.count_tokens(token_rows, token_ids)

    def reserve(self, rows: IntArray) -> Reservation:
        """Extends each of the distinct rows by a place for a token that only the device has yet."""
        columns = self.num_tokens[rows]
        self.token_ids[rows, columns] = 0
        self.num_tokens[rows] += 1
        return Reservation(rows, columns, self.generations[rows])

    def fill(self, reservation: Reservation, token_ids: IntArray) -> None:
        """Writes tokens to their reserved places, except in rows that belong to another request by now."""
        is_same = self.generations[reservation.rows] == reservation.generations
        rows, token_ids = reservation.rows[is_same], token_ids[is_same]
        self.token_ids[rows, reservation.columns[is_same]] = token_ids
        self.sampling.penalties.count_tokens(rows, token_ids)

    def _row(self, request_id: str) -> int:
        row = self._request_id_to_row.get(request_id)
        if row is None:
            raise InputBatchError(f"request {request_id!r} is scheduled, but the runner has no row for it")
        return row

    def _checked_token_ids(self, request: NewRequest) -> IntArray:
        request_id, num_tokens = request.request_id, len(request.token_ids)
        if request_id in self._request_id_to_row:
            raise InputBatchError(f"request {request_id!r} is new, but the runner has a row for it already")
        if not self._free_rows:
            raise InputBatchError(f"request {request_id!r} does not fit: all {len(self)} rows are in use")
        if not 1 <= request.num_prompt_tokens <= num_tokens <= self._max_model_len:
            raise InputBatchError(
                f"request {request_id!r} has {num_tokens} tokens, {request.num_prompt_tokens} of them prompt;"
                f" the runner takes 1 to {self._max_model_len}"
            )
        if request.lora_name is not None and (self._adapters is None or request.lora_name not in self._adapters):
            raise InputBatchError(f"request {request_id!r} names adapter {request.lora_name!r}, which is not loaded")
        # A single id out of range would fail the whole step in the embedding.
        if (token_ids := _within(request.token_ids, self._vocab_size)) is None:
            raise InputBatchError(f"request {request_id!r} has a token id outside [0, {self._vocab_size})")
        return token_ids

    def _schedule(self, scheduled: Sequence[ScheduledRequest]) -> StepRows:
        columns = zip(*scheduled, strict=True) if scheduled else ((),) * len(ScheduledRequest._fields)
        request_ids, num_computed, num_scheduled, block_ids, draft_ids = columns
        row_list = [self._row(request_id) for request_id in request_ids]
        if len(set(row_list)) != len(row_list):
            raise InputBatchError("a request is scheduled twice in one step")
        if any(block_ids) or any(draft_ids):
            for row, request in zip(row_list, scheduled, strict=True):
                if request.new_block_ids:
                    self._append_blocks(row, request)
                if request.draft_token_ids:
                    self._place_drafts(row, request)
        # One array for all columns: each call of numpy takes 2 to 5 µs after the weights have passed the caches.
        values = (row_list, num_computed, num_scheduled, list(map(len, draft_ids)))
        rows, computed, counts, num_drafts = np.array(values, dtype=np.int64)
        num_left = self.num_tokens[rows] + num_drafts - computed - counts
        step = StepRows(list(request_ids), rows, computed, counts, num_drafts, num_left, sum(num_scheduled))
        self._check_extent(step)
        return step

    def _with_states(self, step: StepRows, scheduled: SchedulerOutput) -> StepRows:
        states = np.array(scheduled.states, dtype=np.int64).reshape(-1, 2)
        if len(states) != len(step.rows):
            raise InputBatchError(f"a step of {len(step.rows)} rows has the states of {len(states)}")
        # A block outside the storage would be written outside its memory, and block 0 is the state of no tokens.
        sources, targets = states[:, 0], states[:, 1]
        if len(states) and (sources.min() < 0 or targets.min() < 1 or states.max() >= self.num_state_blocks):
            raise InputBatchError(f"a row has a state block outside [1, {self.num_state_blocks})")
        if np.intersect1d(sources, targets).size or len(np.unique(targets)) != len(targets):
            raise InputBatchError("a state block is written by two rows of a step, or read by one and written by one")
        return replace(step, states=states)

    def _append_blocks(self, row: int, request: ScheduledRequest) -> None:
        block_ids, num_groups = request.new_block_ids, len(self.group_windows)
        start = int(self.num_row_blocks[row])
        num_new_blocks, num_left_over = divmod(len(block_ids), num_groups)
        if num_left_over:
            raise InputBatchError(
                f"request {request.request_id!r} has blocks that {num_groups} groups cannot share out"
            )
        end = start + num_new_blocks
        if end > self.block_tables.shape[2]:
            raise InputBatchError(f"request {request.request_id!r} has {end} blocks, more than its length needs")
        # A block outside the storage would be written outside its memory.
        if min(block_ids) < 0 or max(block_ids) >= self._num_blocks:
            raise InputBatchError(f"request {request.request_id!r} has a block id outside [0, {self._num_blocks})")
        if num_groups == 1:
            self.block_tables[0, row, start:end] = block_ids
        else:
            self.block_tables[:, row, start:end] = np.reshape(block_ids, (-1, num_groups)).T
        self.num_row_blocks[row] = end

    def _place_drafts(self, row: int, request: ScheduledRequest) -> None:
        """Writes drafts to the places of the tokens that they predict, unless the runner has to make them."""
        drafts = request.draft_token_ids
        start = int(self.num_tokens[row])
        if start + len(drafts) > self._max_model_len:
            raise InputBatchError(f"request {request.request_id!r} has drafts beyond {self._max_model_len} tokens")
        if drafts[0] == DRAFT_TO_MAKE:
            return  # a draft model fills them in
        if min(drafts) < 0 or max(drafts) >= self._vocab_size:
            raise InputBatchError(f"request {request.request_id!r} has a draft outside [0, {self._vocab_size})")
        self.token_ids[row, start : start + len(drafts)] = drafts

    def _check_extent(self, step: StepRows) -> None:
        drafts, computed, num_left = step.num_drafts, step.num_computed_tokens, step.num_left
        num_free_slots = self.num_row_blocks[step.rows] * self.block_size - (computed + step.num_scheduled_tokens)
        # A union of numbers is negative if one of them is, and takes fewer calls than comparisons.
        is_bad = (step.num_scheduled_tokens - drafts - 1 | computed | num_left | num_free_slots) < 0
        if step.has_drafts:
            is_bad |= (drafts > 0) & (num_left > 0)
        if not is_bad.any():
            return
        index = int(is_bad.argmax())
        row = int(step.rows[index])
        raise InputBatchError(
            f"request {step.request_ids[index]!r} is scheduled for {int(step.num_scheduled_tokens[index])} tokens from"
            f" {int(step.num_computed_tokens[index])} on, but has {int(self.num_tokens[row])} tokens and blocks for"
            f" {int(self.num_row_blocks[row]) * self.block_size}"
        )


def _within(token_ids: list[int], vocab_size: int) -> IntArray | None:
    """The ids as an array; None where one is out of [0, `vocab_size`)."""
    try:
        found = np.asarray(array("I", token_ids))  # a third of what numpy takes for a list
    except OverflowError:
        return None
    return found.astype(np.int64) if int(found.max()) < vocab_size else None


def _placeholders(request: NewRequest) -> list[range]:
    """The places of the prompt with vectors that a user gave: their ids stand for no token."""
    return [range(item.offset, item.end) for _, item in request.media if item.kind == "embeds"]
