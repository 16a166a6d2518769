"""Captured decode steps at padded numbers of rows, from row state to tokens."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from llmstack_kernels.decode_inputs import FIRST_BLOCK, DecodeInputs, decode_inputs
from llmstack_kernels.state_rows import StateRows
from llmstack_model_runner.adapters.store import AdapterStore
from llmstack_model_runner.device.runtime import DeviceRuntime, Graph, GraphCaptureError
from llmstack_model_runner.device.staging import Staging
from llmstack_model_runner.layers.attention_metadata import AttentionMetadata, GroupTables
from llmstack_model_runner.models.base import CausalLM
from llmstack_model_runner.models.kv_spec import KVCaches
from llmstack_model_runner.ragged import IntArray
from llmstack_model_runner.steps.gpu.places import Drafts, Places
from llmstack_model_runner.steps.gpu.rows import DeviceRows
from llmstack_model_runner.steps.gpu.sampling_rows import DeviceSamplingRows, SamplingVariant
from llmstack_model_runner.steps.input_batch import InputBatch
from llmstack_types import ModelRunnerConfig

logger = logging.getLogger(__name__)

_MAX_DEFAULT_SIZE = 512
_VARIANTS = (SamplingVariant.RANDOM, SamplingVariant.GREEDY, None)


class _Key(NamedTuple):
    """The work of a captured step, as a key.

    Attributes:
        size: Number of rows, or of their places if there may be drafts.
        variant: How it samples; None where the caller does.
        num_adapted: Layers that adapters of its rows change; 0 for rows without.
    """

    size: int
    variant: SamplingVariant | None
    num_adapted: int = 0


def decode_sizes(max_num_seqs: int, given: Sequence[int] = ()) -> list[int]:
    """Numbers of rows to capture, ascending.

    These are the given ones up to `max_num_seqs`, by default 1, 2, 4, multiples of 8, and from 64 on four in each
    doubling: 23 up to 512. Other steps are padded to the next number: by at most a quarter from 32 rows on, where a row
    costs little besides reading the weights.
    """
    if given:
        return sorted({size for size in given if 1 <= size <= max_num_seqs})
    most = min(max_num_seqs, _MAX_DEFAULT_SIZE)
    sizes = {
        1,
        2,
        4,
        *range(8, 64, 8),
        *(64 * times + 16 * times * part for times in (1, 2, 4) for part in range(4)),
        most,
    }
    return sorted(size for size in sizes if size <= most)


def most_decode_rows(config: ModelRunnerConfig) -> int:
    """Most rows of a captured step; a row with drafts counts as one for each of its places."""
    return min(config.max_num_seqs * (1 + config.max_num_drafts), config.max_num_batched_tokens)


class DecodeGraphs:
    """Replays decode steps, which the start captures.

    A graph contains inputs, model, sampler and the update of the rows. If the host takes part in sampling (grammars,
    log-probabilities, rare parameters), or rows have penalties or adapters, it contains inputs and model only.

    If there may be drafts, each place of a row is computed as a decode of its own, with the bits that it has without
    drafts; the sampler takes all places at once, and the rows advance by the drafts that were right.

    A capture takes 50 to 100 ms in which no stream gets a token, so none is made while the server serves: a step
    without a graph of its size takes the next larger one. After `drop` the same are captured again as they are needed.
    """

    def __init__(
        self,
        model: CausalLM,
        kv_caches: KVCaches,
        rows: DeviceRows,
        sampling: DeviceSamplingRows,
        runtime: DeviceRuntime,
        staging: Staging,
        sizes: Sequence[int],
        batch: InputBatch,
        adapters: AdapterStore | None = None,
        *,
        has_drafts: bool = False,
    ) -> None:
        """`sizes`: Numbers of rows to capture, ascending; `batch`: where the rows' blocks are.

        `adapters`: Those that rows may have; None without any. `has_drafts`: Whether there may be drafts.
        """
        self._model = model
        self._kv_caches = kv_caches
        self._rows = rows
        self._sampling = sampling
        self._runtime = runtime
        self._staging = staging
        self._sizes = list(sizes)
        self._block_size = batch.block_size
        self._graphs: dict[_Key, Graph] = {}
        self._refused: set[_Key] = set()
        self._reason_for_none = ""
        self._adapters = adapters
        self._captures_when_needed = True  # as at the start, so that its decodes replay graphs
        self._layer_to_group = batch.layer_to_group
        self._scratch_state = batch.num_state_blocks  # which padding rows write to; 0 for a model without states
        num_rows, num_blocks = self._sizes[-1], rows.states[0].shape[1] - FIRST_BLOCK
        device = runtime.device
        self._max_seq_len = num_blocks * batch.block_size
        self._row_numbers = torch.full((num_rows,), rows.scratch_row, dtype=torch.int32, device=device)
        self._known_row_numbers = np.full(num_rows, rows.scratch_row, dtype=np.int32)
        self._inputs = [_empty_inputs(num_rows, num_blocks, device) for _ in rows.states]  # of each group of layers
        self._query_start_loc = torch.arange(num_rows + 1, dtype=torch.int32, device=device)
        self._states = torch.zeros((2, num_rows), dtype=torch.int64, device=device)  # which each row reads and writes
        self._num_known_tokens = torch.ones(num_rows, dtype=torch.int64, device=device)
        self._results = torch.empty(num_rows, dtype=torch.int32, device=device)
        self._drafts = torch.zeros((num_rows, 2), dtype=torch.int32, device=device) if has_drafts else None
        self._num_known_drafts = 0  # leading places whose drafts are on the device; the others are zeros
        self._logits: torch.Tensor | None = None

    def capture_all(self) -> None:
        """Captures each size in each variant, the largest first, so that the others share its memory."""
        self._runtime.release_cached_memory()
        num_adapted = 0 if self._adapters is None else self._adapters.num_capturable_layers
        for size in reversed(self._sizes):
            for variant in _VARIANTS:
                self._capture(_Key(size, variant))
            if num_adapted:
                self._capture(_Key(size, None, num_adapted))
        self._captures_when_needed = False
        logger.info("decode steps: %s", self.describe())

    def sample(
        self, rows: IntArray, variant: SamplingVariant, states: IntArray | None = None, drafts: Drafts | None = None
    ) -> torch.Tensor | None:
        """Decodes, samples and advances the given rows of the state; None if no graph is available.

        `states` are the state blocks that each row reads and writes: [num_rows, 2]; None for a model without.
        `rows` and `drafts` are what `lay_out_places` returns. Returns the tokens of all places in newly allocated
        memory, -1 for invalid ones: int32 [num_rows].
        """
        if not self._launch(rows, variant, states, drafts):
            return None
        if self._drafts is None:
            self._rows.note_advance(rows)
        else:
            self._rows.note_kept(rows)
        return self._results[: len(rows)].clone()

    def compute_logits(
        self, rows: IntArray, states: IntArray | None = None, drafts: Drafts | None = None, num_adapted: int = 0
    ) -> tuple[torch.Tensor, Places] | None:
        """Decodes the given rows, which the caller samples and advances; None if no graph is available.

        `states`, `drafts`: As for `sample`. `num_adapted`: Layers that the adapters of the step change.

        Returns logits and their places, both overwritten by the next call: float32 [num_rows, vocab_size].
        """
        if not self._launch(rows, None, states, drafts, num_adapted) or self._logits is None:
            return None
        sent = None if self._drafts is None else self._drafts[: len(rows)]
        return self._logits[: len(rows)], Places(rows, self._row_numbers[: len(rows)], sent)

    def drop(self) -> None:
        """Frees the graphs, which are captured again when needed. No step may be in flight."""
        self._graphs.clear()
        self._refused.clear()
        self._captures_when_needed = True
        self._logits = None
        self._runtime.graph_bytes = 0

    def describe(self) -> str:
        if self._reason_for_none:
            return f"not captured: {self._reason_for_none}"
        megabytes = self._runtime.graph_bytes / 1e6
        captured = f"{len(self._graphs)} captured graphs of up to {self._sizes[-1]} rows use {megabytes:.0f} MB"
        return f"{captured}; no memory for {len(self._refused)} more" if self._refused else captured

    def _launch(
        self,
        rows: IntArray,
        variant: SamplingVariant | None,
        states: IntArray | None,
        drafts: Drafts | None,
        num_adapted: int = 0,
    ) -> bool:
        key = self._find(len(rows), variant, num_adapted)
        if key is None:
            return False
        padded = np.full(key.size, self._rows.scratch_row, dtype=np.int32)
        padded[: len(rows)] = rows
        self._place(padded, states, drafts)
        self._graphs[key].replay()
        return True

    def _find(self, num_rows: int, variant: SamplingVariant | None, num_adapted: int) -> _Key | None:
        """The smallest captured step of so many rows or more; None without one."""
        if variant not in _VARIANTS:
            return None
        for size in self._sizes[bisect_left(self._sizes, num_rows) :]:
            key = _Key(size, variant, num_adapted)
            if self._captures_when_needed:
                self._capture(key)
            if key in self._graphs:
                return key
        return None

    def _place(
        self,
        row_numbers: np.ndarray[tuple[int], np.dtype[np.int32]],
        states: IntArray | None = None,
        drafts: Drafts | None = None,
    ) -> None:
        size = len(row_numbers)
        arrays: list[npt.NDArray[Any]] = []
        if is_other := not np.array_equal(self._known_row_numbers[:size], row_numbers):
            arrays.append(row_numbers)
        if self._scratch_state:
            padded = np.zeros((2, size), dtype=np.int64)
            padded[1] = self._scratch_state
            if states is not None:
                padded[:, : len(states)] = states.T
            arrays.append(padded)
        if drafts is not None or self._num_known_drafts:
            places = np.zeros((max(size, self._num_known_drafts), 2), dtype=np.int32)
            if drafts is not None:
                places[: len(drafts)] = drafts
            arrays.append(places)
            self._num_known_drafts = 0 if drafts is None else len(drafts)
        sent = self._staging.send(arrays) if arrays else []
        if is_other:
            self._row_numbers[:size].copy_(sent.pop(0))
            self._known_row_numbers[:size] = row_numbers
        if self._scratch_state:
            self._states[:, :size].copy_(sent.pop(0))
        if sent and self._drafts is not None:
            self._drafts[: len(sent[0])].copy_(sent[0])

    def _capture(self, key: _Key) -> None:
        if key in self._graphs or key in self._refused or self._reason_for_none:
            return
        size = key.size
        # The capture executes the work once, on the scratch row.
        self._place(np.full(size, self._rows.scratch_row, dtype=np.int32))
        try:
            if key.variant is None and self._logits is None:
                shape = (self._sizes[-1], self._model.kv_spec.vocab_size)
                self._logits = torch.empty(shape, dtype=torch.float32, device=self._runtime.device)
            self._graphs[key] = self._runtime.capture(lambda: self._compute(key))
        except torch.OutOfMemoryError:
            logger.warning("no memory to capture decode steps of %d rows: they run without a graph", size)
            self._refused.add(key)
        except GraphCaptureError as error:
            logger.warning("decode steps cannot be captured and run without graphs: %s", error)
            self._reason_for_none, self._graphs = str(error), {}

    def _state_rows(self, size: int) -> StateRows | None:
        if not self._scratch_state:
            return None
        sources, targets = self._states[:, :size]
        return StateRows(self._query_start_loc[: size + 1], sources, targets, self._num_known_tokens[:size])

    def _compute(self, key: _Key) -> None:
        size, variant, num_adapted = key
        drafts = None if self._drafts is None else self._drafts[:size]
        rows, of_groups = self._row_numbers[:size], [_first(inputs, size) for inputs in self._inputs]
        for state, of_group in zip(self._rows.states, of_groups, strict=True):
            decode_inputs(state, rows, self._block_size, of_group, drafts)
        inputs = of_groups[0]
        metadata = AttentionMetadata(
            query_start_loc=self._query_start_loc[: size + 1],
            seq_lens=inputs.seq_lens,
            block_tables=inputs.block_tables,
            slot_mapping=inputs.slot_mapping,
            query_start_loc_list=None,
            seq_lens_list=None,
            max_query_len=1,
            max_seq_len=self._max_seq_len,
            states=self._state_rows(size),
        )
        tables = [GroupTables(of_group.block_tables, of_group.slot_mapping) for of_group in of_groups]
        metadata = metadata.with_groups(tables, self._layer_to_group)
        in_places = nullcontext() if self._adapters is None else self._adapters.in_fixed_places(size, num_adapted)
        with in_places:
            hidden = self._model.forward(inputs.token_ids, inputs.positions, metadata, self._kv_caches)
            logits = self._model.compute_logits(hidden)
        if variant is not None:
            sample = self._sampling.sample(logits, rows, variant, drafts=drafts)
            token_ids, is_good = sample.token_ids, sample.is_good
            if drafts is None:
                self._rows.advance_states(rows, token_ids, is_good, self._results[:size])
            else:
                num_kept = self._rows.keep_drafts(rows, drafts, token_ids, is_good)
                self._sampling.count_kept(rows, num_kept)
                self._results[:size].copy_(torch.where(is_good, token_ids, -1))
        elif self._logits is not None:
            # Out of the graphs' shared memory, which the next replay overwrites.
            self._logits[:size].copy_(logits)


def _empty_inputs(num_rows: int, num_blocks: int, device: torch.device) -> DecodeInputs:
    def empty(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    return DecodeInputs(
        token_ids=empty(torch.int64, num_rows),
        positions=empty(torch.int64, num_rows),
        seq_lens=empty(torch.int32, num_rows),
        slot_mapping=empty(torch.int64, num_rows),
        # Zeros, since entries beyond a context are never read but must be valid block ids.
        block_tables=empty(torch.int32, num_rows, num_blocks),
    )


def _first(inputs: DecodeInputs, size: int) -> DecodeInputs:
    return DecodeInputs(
        inputs.token_ids[:size],
        inputs.positions[:size],
        inputs.seq_lens[:size],
        inputs.slot_mapping[:size],
        inputs.block_tables[:size],
    )
