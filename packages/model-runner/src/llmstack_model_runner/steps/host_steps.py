"""Synchronous steps, for CPUs and for models without an LM head."""

from __future__ import annotations

import torch

from llmstack_model_runner.models import CausalLM, Model
from llmstack_model_runner.models.base import KVCaches
from llmstack_model_runner.models.label_head import LabelHead
from llmstack_model_runner.sampling import Sampler, SamplerOutput
from llmstack_model_runner.steps.computation import Computed, MakeTokenMasks, compute, make_bitmask, sample_on_host
from llmstack_model_runner.steps.cpu_graphs import DecodeOutput, GraphRunner
from llmstack_model_runner.steps.input_batch import InputBatch, StepRows
from llmstack_model_runner.steps.output import PendingOutput, PendingStep
from llmstack_model_runner.steps.prepare_inputs import ModelInputs, prepare_inputs
from llmstack_model_runner.steps.timing import StepTiming
from llmstack_types import SchedulerOutput


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
        *,
        label_head: LabelHead | None = None,
        max_num_captured_blocks: int = 0,
    ) -> None:
        """`max_num_captured_blocks`: Longest block table of captured steps; 0 disables graph capture."""
        self._timing = timing
        self._model = model
        self._batch = batch
        self._kv_caches = kv_caches
        self._sampler = sampler
        self._device = device
        self._label_head = label_head
        self._unread: PendingOutput | None = None
        self._graphs: GraphRunner | None = None
        if max_num_captured_blocks and isinstance(model, CausalLM):
            self._graphs = GraphRunner(model, kv_caches, max_num_captured_blocks)

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
        with self._timing.phase("prepare"):
            inputs = prepare_inputs(self._batch, step, self._device)
        batch = self._batch
        with self._timing.phase("forward"):
            decoded = self._repeat_decode(inputs)
            if decoded is not None:
                computed = Computed(decoded.logits)
            else:
                computed = compute(self._model, batch, step, inputs, self._kv_caches, self._label_head)
        with self._timing.phase("sample"):
            sampled: SamplerOutput | None = None
            if decoded is not None and token_masks is None and batch.sampling.is_all_greedy:
                sampled = decoded.greedy_choice()
            elif computed.logits is not None:
                indices = inputs.sampling_indices
                bitmask = None if token_masks is None else make_bitmask(step, indices, token_masks)
                sampled = sample_on_host(self._sampler, batch, step, indices, computed.logits, bitmask)
        self._timing.note_step(len(inputs.token_ids))
        return PendingStep(batch, step, inputs.sampling_indices, sampled, computed.prompt_logprobs, computed.pooled)

    def finish_warm_up(self) -> None:
        """Does nothing, since warm-up steps have prepared everything."""

    def describe(self) -> str:
        """Description of how decode steps are run; empty if there are no graphs."""
        return "" if self._graphs is None else self._graphs.describe()

    def _repeat_decode(self, inputs: ModelInputs) -> DecodeOutput | None:
        """Results of a replayed decode step; None for steps that cannot be replayed."""
        if self._graphs is None or self._batch.num_prompt_logprobs or len(self._batch.pooling):
            return None
        return self._graphs.run(inputs)
