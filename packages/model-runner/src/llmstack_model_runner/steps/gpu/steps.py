"""Asynchronous steps on a device, with the last step's tokens as inputs."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from llmstack_model_runner.adapters.store import AdapterStore
from llmstack_model_runner.device.runtime import DeviceRuntime, Fetched
from llmstack_model_runner.device.staging import Staging
from llmstack_model_runner.layers.step_vectors import StepVectors
from llmstack_model_runner.models import CausalLM
from llmstack_model_runner.models.heads import NO_HEADS, Heads
from llmstack_model_runner.models.kv_spec import KVCaches
from llmstack_model_runner.ragged import IntArray
from llmstack_model_runner.sampling import ALL_MASKED, HostTokens, LogprobsTensors, Sampler, SamplerOutput
from llmstack_model_runner.steps.computation import (
    Computed,
    FindVectors,
    MakeTokenMasks,
    compute,
    make_bitmask,
    sample_on_host,
)
from llmstack_model_runner.steps.gpu.decode_graphs import DecodeGraphs, decode_sizes, most_decode_rows
from llmstack_model_runner.steps.gpu.inputs import prepare_device_inputs
from llmstack_model_runner.steps.gpu.places import Places, lay_out_places
from llmstack_model_runner.steps.gpu.rows import DeviceRows
from llmstack_model_runner.steps.gpu.sampler import DeviceSampler
from llmstack_model_runner.steps.gpu.sampling_rows import DeviceSamplingRows
from llmstack_model_runner.steps.input_batch import InputBatch, InputBatchError, StepRows
from llmstack_model_runner.steps.output import PendingOutput, PendingStep
from llmstack_model_runner.steps.prepare_inputs import find_sampling_rows
from llmstack_model_runner.steps.timing import StepTiming
from llmstack_types import ModelRunnerConfig, SchedulerOutput

_MAX_NUM_UNREAD = 1
"""Unread steps when another one begins: the host is at most one step ahead of the device."""


@dataclass(frozen=True, slots=True)
class FetchedSample:
    """Sampled tokens and their log-probabilities, with started copies to the host."""

    fetched: Fetched
    timing: StepTiming
    logprob_rows: tuple[int, ...] = ()
    logprobs: LogprobsTensors | None = None  # on the device

    def on_host(self) -> HostTokens:
        """Blocks until this step's results are on the host; later work continues."""
        with self.timing.wait:
            results, *tensors = self.fetched.wait()
        logprobs = None if self.logprobs is None else self.logprobs.elsewhere(tensors)
        token_ids = results.numpy()
        return HostTokens(token_ids.astype(np.int64), token_ids >= 0, self.logprob_rows, logprobs)


class DeviceSteps:
    """Steps of a language model whose rows are on the device.

    Steps in which every row decodes are captured and replayed, with drafts too; all others are launched operation by
    operation. So are those whose adapters change experts, for which the host waits, drafts of models with a state, and
    the last token of a prompt alone, if a vector stands in its place: captured steps take ids. The host waits for the
    last step only if it needs its tokens: for drafts, and for rows with parameters that the device's sampler does not
    support.
    """

    def __init__(
        self,
        model: CausalLM,
        batch: InputBatch,
        kv_caches: KVCaches,
        sampler: Sampler,
        runtime: DeviceRuntime,
        config: ModelRunnerConfig,
        timing: StepTiming,
        find_vectors: FindVectors,
        adapters: AdapterStore | None = None,
        heads: Heads = NO_HEADS,
    ) -> None:
        """The last block of `kv_caches` is the scratch block, which padding rows write to.

        `timing`: Counters of the host's time; `wait` is the time spent waiting for the device.
        `find_vectors`: The vectors that stand in place of tokens of a step.
        `adapters`: Those that rows of the batch may have; None without any.
        `heads`: What the model has behind its hidden states.
        """
        self._model = model
        self._batch = batch
        self._kv_caches = kv_caches
        self._sampler = sampler
        self._runtime = runtime
        self._timing = timing
        self._staging = Staging(runtime)
        self._find_vectors = find_vectors
        self._heads = heads
        self._adapters = adapters
        if adapters is not None:
            adapters.use_staging(self._staging.send)
        with_blocks = kv_caches[model.kv_spec.first_attention or 0]
        self._rows = DeviceRows(batch, len(with_blocks[0]) - 1, runtime, self._staging)
        sampling_rows = DeviceSamplingRows(config.max_num_seqs, model.kv_spec.vocab_size, runtime.device)
        self._device_sampler = DeviceSampler(
            batch,
            sampling_rows,
            self._staging,
            has_processors=bool(config.logits_processors),
            is_raw=config.logprobs_mode == "raw_logprobs",
            has_drafts=bool(config.max_num_drafts),
        )
        self._unread: deque[PendingOutput] = deque()
        self._max_num_drafts = config.max_num_drafts
        self._graphs, self._reason_for_none = None, _reason_against_graphs(model, config)
        most_rows = most_decode_rows(config)
        if batch.has_states:  # a row holds two of them, beside the one before the first token
            most_rows = min(most_rows, max((batch.num_state_blocks - 1) // 2, 1))
        sizes = decode_sizes(most_rows, config.cuda_graph_sizes)
        if not self._reason_for_none and sizes:
            parts = (model, kv_caches, self._rows, sampling_rows, runtime, self._staging)
            self._graphs = DecodeGraphs(*parts, sizes, batch, adapters, has_drafts=bool(config.max_num_drafts))

    def settle(self, scheduled: SchedulerOutput) -> None:
        """Waits for the step before the last one, and for the last one too if the next step depends on its tokens.

        Raises:
            InputBatchError: There are drafts although `max_num_drafts` is 0, and the device cannot verify them.
        """
        has_drafts = any(row.draft_token_ids for row in scheduled.scheduled_requests)
        if has_drafts and not self._max_num_drafts:
            raise InputBatchError("a step has draft tokens, but max_num_drafts is 0")
        self._read(0 if has_drafts or self._is_length_unknown() else _MAX_NUM_UNREAD)

    def follow(self, pending: PendingOutput) -> None:
        """Notes a started step whose results are not read yet."""
        self._unread.append(pending)

    @torch.inference_mode()
    def run(self, step: StepRows, token_masks: MakeTokenMasks | None = None) -> PendingStep:
        """Starts rows that the batch contains.

        If that fails, the rows are unchanged, and their state on the device is sent again.
        """
        try:
            return self._run(step, token_masks)
        except BaseException:
            self._read(0)
            self._rows.forget(step.rows)
            self._device_sampler.forget(step.rows)
            raise

    @torch.inference_mode()
    def finish_warm_up(self) -> None:
        """Captures all sizes of decode steps, so that none is captured while streams run."""
        if self._graphs is not None:
            self._graphs.capture_all()

    def make_room(self) -> None:
        """Frees the memory of captured graphs."""
        self._read(0)
        if self._graphs is not None:
            self._graphs.drop()

    def describe(self) -> str:
        """Description of how decode steps are run."""
        return f"not captured: {self._reason_for_none}" if self._graphs is None else self._graphs.describe()

    def _is_length_unknown(self) -> bool:
        """Whether a row's length depends on drafts that are not verified yet."""
        return any(isinstance(pending, PendingStep) and pending.step.num_drafts.any() for pending in self._unread)

    def _read(self, num_left: int) -> None:
        while len(self._unread) > num_left:
            self._unread.popleft().result()

    def _run(self, step: StepRows, token_masks: MakeTokenMasks | None) -> PendingStep:
        indices = find_sampling_rows(self._batch, step)
        rows = step.rows[indices]
        with self._timing.prepare:
            is_refused = self._device_sampler.refused(rows)
            if is_refused.any():
                self._read(0)  # the host's sampler needs all earlier tokens
            self._rows.update(step.rows, rows)
        self._timing.note_step(step.num_tokens)
        is_decode = len(indices) == len(step.rows) and bool((step.num_scheduled_tokens == step.num_drafts + 1).all())
        if step.has_drafts and self._batch.has_states:
            is_decode = False  # each place would need the state of the one before
        num_adapted = 0
        if self._adapters is not None:
            numbers = self._batch.adapter_numbers[step.rows]
            if self._adapters.begin_step(numbers, step.num_scheduled_tokens):
                num_adapted = self._adapters.num_capturable_layers
                is_decode = is_decode and num_adapted > 0
        vectors = self._find_vectors(step) if self._batch.media else None
        if is_decode and vectors is None and self._graphs is not None:
            pending = self._repeat_decode(self._graphs, step, num_adapted, is_refused, token_masks)
            if pending is not None:
                return pending
        return self._run_eagerly(step, vectors, is_refused, token_masks)

    def _repeat_decode(
        self,
        graphs: DecodeGraphs,
        step: StepRows,
        num_adapted: int,
        is_refused: npt.NDArray[np.bool_],
        token_masks: MakeTokenMasks | None,
    ) -> PendingStep | None:
        indices = np.arange(len(step.rows))
        rows, drafts = lay_out_places(self._batch, step, indices)
        is_of_device = token_masks is None and not is_refused.any() and not self._device_sampler.has_logprobs(rows)
        if is_of_device and not num_adapted:
            with self._timing.forward:
                results = graphs.sample(rows, self._device_sampler.update(rows), step.states, drafts)
            if results is not None:
                return self._finish(step, indices, results)
        with self._timing.forward:
            decoded = graphs.compute_logits(rows, step.states, drafts, num_adapted)
        if decoded is None:
            return None
        return self._sample(step, indices, Computed(decoded[0]), decoded[1], is_refused, token_masks)

    def _run_eagerly(
        self,
        step: StepRows,
        vectors: StepVectors | None,
        is_refused: npt.NDArray[np.bool_],
        token_masks: MakeTokenMasks | None,
    ) -> PendingStep:
        with self._timing.prepare:
            inputs = prepare_device_inputs(self._batch, step, self._rows.states, self._staging, vectors)
        with self._timing.forward:
            select_rows = None if self._adapters is None else self._adapters.select_rows
            computed = compute(self._model, self._batch, step, inputs.model, self._kv_caches, self._heads, select_rows)
        indices = inputs.model.sampling_indices
        return self._sample(step, indices, computed, inputs.places, is_refused, token_masks)

    def _sample(
        self,
        step: StepRows,
        indices: IntArray,
        computed: Computed,
        places: Places,
        is_refused: npt.NDArray[np.bool_],
        token_masks: MakeTokenMasks | None,
    ) -> PendingStep:
        """Samples for the rows of the step that `indices` name, at these places."""
        if computed.logits is None:
            empty = np.zeros(0, dtype=np.int64)
            return PendingStep(self._batch, step, empty, None, computed.prompt_logprobs, computed.pooled)
        with self._timing.sample:
            bitmask = None if token_masks is None else make_bitmask(step, indices, token_masks)
            on_host = partial(sample_on_host, self._sampler, self._batch, step)
            choice = self._device_sampler.choose(computed.logits, places, step.rows[indices], indices, bitmask, on_host)
            results = self._advance(places, choice)
            if is_refused.any():  # rows with masks, which may leave no token
                results = torch.where(choice.token_ids == ALL_MASKED, ALL_MASKED, results)
        return self._finish(step, indices, results, choice, computed)

    def _advance(self, places: Places, choice: SamplerOutput) -> torch.Tensor:
        """Advances the rows of these places; their tokens, -1 for invalid ones: int32 [num_places]."""
        token_ids, is_good = choice.token_ids, choice.is_good
        if places.drafts is None:
            return self._rows.advance(places.rows, places.device_rows, token_ids, is_good)
        num_kept = self._rows.keep_drafts(places.device_rows, places.drafts, token_ids, is_good)
        self._rows.note_kept(places.rows)
        self._device_sampler.count_kept(places.device_rows, num_kept)
        return torch.where(is_good, token_ids, -1).int()

    def _finish(
        self,
        step: StepRows,
        indices: IntArray,
        results: torch.Tensor,
        choice: SamplerOutput | None = None,
        computed: Computed | None = None,
    ) -> PendingStep:
        """Starts the copy of the results to the host, and reserves their places in the batch."""
        if choice is None or choice.logprobs is None:
            sampled = FetchedSample(self._runtime.fetch([results]), self._timing)
        else:
            fetched = self._runtime.fetch([results, *choice.logprobs.tensors])
            sampled = FetchedSample(fetched, self._timing, choice.logprob_rows, choice.logprobs)
        # With drafts the number of a row's tokens is not known yet, so they are appended later.
        reservation = None if step.num_drafts.any() else self._batch.reserve(step.rows[indices])
        prompt_logprobs, pooled = ((), ()) if computed is None else (computed.prompt_logprobs, computed.pooled)
        return PendingStep(self._batch, step, indices, sampled, prompt_logprobs, pooled, reservation)


def _reason_against_graphs(model: CausalLM, config: ModelRunnerConfig) -> str:
    """The reason why decode steps are not captured; empty if they are."""
    if config.enforce_eager:
        return "eager steps are asked for"
    if config.draft_head:
        return "the draft head needs hidden states"
    if not model.kv_spec.num_layers:
        return "the model has no KV storage"
    selected = model.kv_spec.num_selected
    if selected is not None and config.max_model_len > selected:
        return f"attention selects {selected} tokens of longer contexts"
    return "" if model.implementation == "llmstack" else f"modelling code of {model.implementation}"
