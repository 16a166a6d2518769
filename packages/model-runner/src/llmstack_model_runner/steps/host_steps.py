"""Synchronous steps, for CPUs and for models without an LM head."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from llmstack_model_runner.adapters.store import AdapterStore
from llmstack_model_runner.layers.sharding import Sharding
from llmstack_model_runner.layers.step_vectors import StepVectors
from llmstack_model_runner.media.cross_store import CrossStore
from llmstack_model_runner.models import CausalLM, Model
from llmstack_model_runner.models.heads import NO_HEADS, Heads
from llmstack_model_runner.models.kv_spec import KVCaches
from llmstack_model_runner.ragged import IntArray
from llmstack_model_runner.sampling import GreedyChoice, Sampler, SamplerOutput
from llmstack_model_runner.steps.computation import (
    Computed,
    FindVectors,
    MakeTokenMasks,
    compute,
    compute_stage,
    make_bitmask,
    sample_on_host,
)
from llmstack_model_runner.steps.cpu_graphs import DecodeOutput, GraphRunner
from llmstack_model_runner.steps.input_batch import InputBatch, StepRows
from llmstack_model_runner.steps.output import PendingOutput, PendingStep, Sampled
from llmstack_model_runner.steps.prepare_inputs import prepare_inputs
from llmstack_model_runner.steps.timing import StepTiming
from llmstack_types import SchedulerOutput


@dataclass(frozen=True, slots=True)
class _UnsampledStep:
    """A step that the last stage samples: its rows, their requests, and the rows that are sampled."""

    rows: IntArray
    generations: IntArray
    sampling_indices: IntArray


class HostSteps:
    """Computes steps one after the other; each starts when the tokens of the last one are known."""

    def __init__(
        self,
        model: Model,
        batch: InputBatch,
        kv_caches: KVCaches,
        sampler: Sampler,
        device: torch.device,
        timing: StepTiming,
        find_vectors: FindVectors,
        *,
        heads: Heads = NO_HEADS,
        max_num_captured_blocks: int = 0,
        sharding: Sharding | None = None,
        adapters: AdapterStore | None = None,
        cross: CrossStore | None = None,
    ) -> None:
        """`find_vectors`: The vectors that stand in place of tokens of a step.

        `max_num_captured_blocks`: Longest block table of captured steps; 0 disables graph capture.
        `sharding`: Which part of the model it is; a stage without the head samples nothing.
        `adapters`: Those that rows of the batch may have; None without any.
        `cross`: What rows attend to across; None for a model without cross attention.
        """
        self._cross = cross
        self._has_head = has_head = sharding is None or sharding.is_last_stage
        self._unsampled: deque[_UnsampledStep] = deque()
        self._timing = timing
        self._model = model
        self._batch = batch
        self._kv_caches = kv_caches
        self._sampler = sampler
        self._device = device
        self._heads = heads
        self._adapters = adapters
        self._find_vectors = find_vectors
        self._unread: PendingOutput | None = None
        self._graphs: GraphRunner | None = None
        if max_num_captured_blocks and isinstance(model, CausalLM):
            links = None if sharding is None else sharding.links
            self._graphs = GraphRunner(
                model, kv_caches, max_num_captured_blocks, has_head=has_head, links=links, cross=cross
            )

    def settle(self, scheduled: SchedulerOutput) -> None:
        """Waits for the last step, since its tokens are inputs of the next one."""
        if self._unread is not None:
            self._unread.result()
            self._unread = None

    def follow(self, pending: PendingOutput) -> None:
        """Notes a started step whose results are not read yet."""
        self._unread = pending

    def run(self, step: StepRows, token_masks: MakeTokenMasks | None = None) -> PendingStep:
        """Computes rows that the batch contains."""
        batch, timing, adapters = self._batch, self._timing, self._adapters
        num_adapted = 0
        if adapters is not None:
            num_adapted = adapters.begin_step(batch.adapter_numbers[step.rows], step.num_scheduled_tokens)
        vectors = self._find_vectors(step) if batch.media else None
        with timing.forward:  # captured steps take token ids alone
            decoded = self._repeat_decode(step, num_adapted) if vectors is None else None
        if decoded is None:
            sampling_indices, computed = self._compute(step, num_adapted, vectors)
        else:
            sampling_indices = np.arange(len(step.rows))
            computed = Computed(decoded.logits if self._has_head else None)
        with timing.sample:
            sampled: Sampled | None = None
            if decoded is not None and token_masks is None and batch.sampling.is_all_greedy:
                sampled = decoded.greedy_tokens()
            elif computed.logits is not None:
                greedy = None if decoded is None else decoded.greedy
                sampled = self._sample(step, sampling_indices, computed.logits, token_masks, greedy)
        timing.note_step(step.num_tokens)
        if not self._has_head:
            self._unsampled.append(_UnsampledStep(step.rows, batch.generations[step.rows], sampling_indices))
        return PendingStep(batch, step, sampling_indices, sampled, computed.prompt_logprobs, computed.pooled)

    def _repeat_decode(self, step: StepRows, num_adapted: int) -> DecodeOutput | None:
        """Results of a replayed decode step that updates so many layers; None for steps that cannot be replayed.

        Draft tokens are rows of their own in it.
        """
        batch, graphs = self._batch, self._graphs
        if graphs is None or not graphs.can_run(step.num_tokens):
            return None
        if batch.num_prompt_logprobs or batch.pooling.row_to_params:
            return None
        if step.num_left.any():
            return None  # a chunk of a prefill
        if batch.has_states:
            # Rows of drafts would each need the state of the one before; and a replay writes the KV of all tokens.
            is_held = step.num_computed_tokens < batch.num_held_tokens[step.rows]
            if step.num_tokens > len(step.rows) or is_held.any():
                return None
        decodes = step if step.num_tokens == len(step.rows) else step.split_drafts()
        decoded = None if decodes is None else graphs.run(batch, decodes, num_adapted)
        if decoded is not None and batch.on_hidden is not None:
            batch.on_hidden(step, decoded.hidden)
        return decoded

    @torch.inference_mode()
    def _sample(
        self,
        step: StepRows,
        sampling_indices: IntArray,
        logits: torch.Tensor,
        token_masks: MakeTokenMasks | None,
        greedy: GreedyChoice | None,
    ) -> SamplerOutput:
        bitmask = None if token_masks is None else make_bitmask(step, sampling_indices, token_masks)
        return sample_on_host(self._sampler, self._batch, step, sampling_indices, logits, bitmask, greedy)

    @torch.inference_mode()
    def _compute(self, step: StepRows, num_adapted: int, vectors: StepVectors | None) -> tuple[IntArray, Computed]:
        """The rows of the step that sample, and the results of its forward pass."""
        batch, timing, adapters = self._batch, self._timing, self._adapters
        with timing.prepare:
            inputs = prepare_inputs(batch, step, self._device, vectors, self._cross)
        with timing.forward:
            if not self._has_head:
                return inputs.sampling_indices, compute_stage(self._model, inputs, self._kv_caches)
            select_rows = adapters.select_rows if adapters is not None and num_adapted else None
            computed = compute(self._model, batch, step, inputs, self._kv_caches, self._heads, select_rows)
        return inputs.sampling_indices, computed

    def append_tokens(self, sampled_token_ids: Sequence[Sequence[int]] | None) -> None:
        """Appends what the stage with the head has sampled, in the oldest step whose tokens this stage does not have.

        `sampled_token_ids`: The tokens of each row of the step; None appends token 0 where a row samples, for warm-up.
        """
        step = self._unsampled.popleft()
        if sampled_token_ids is None:
            sampled_token_ids = [[0] if index in step.sampling_indices else [] for index in range(len(step.rows))]
        is_same = (self._batch.generations[step.rows] == step.generations).tolist()
        for row, is_present, token_ids in zip(step.rows.tolist(), is_same, sampled_token_ids, strict=True):
            if is_present and token_ids:
                rows, count = np.array([row]), np.array([len(token_ids)])
                self._batch.append_tokens(rows, np.array(token_ids), count)

    def finish_warm_up(self) -> None:
        """Does nothing, since warm-up steps have prepared everything."""

    def describe(self) -> str:
        """Description of how decode steps are run; empty if there are no graphs."""
        return "" if self._graphs is None else self._graphs.describe()
