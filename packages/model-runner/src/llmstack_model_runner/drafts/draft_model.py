"""Draft model: weights, and keys and values under the served model's block ids."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from llmstack_kernels.argmax import argmax
from llmstack_kv_cache.storage import allocate_block_storage
from llmstack_model_runner.layers.sharding import Sharding
from llmstack_model_runner.loading import load_served_model
from llmstack_model_runner.models import CausalLM
from llmstack_model_runner.models.heads import NO_HEADS
from llmstack_model_runner.models.kv_spec import KVCaches
from llmstack_model_runner.ragged import IntArray, ragged_aranges
from llmstack_model_runner.steps.computation import compute
from llmstack_model_runner.steps.cpu_graphs import GraphRunner
from llmstack_model_runner.steps.input_batch import InputBatch, StepRows
from llmstack_model_runner.steps.prepare_inputs import prepare_inputs
from llmstack_types import KVCacheSpec, ModelRunnerConfig

_MAX_REPLAYED_TOKENS = 4
"""Tokens of a row that are replayed as rows of their own; more, as of a prompt, are faster together."""


@dataclass(slots=True)
class _Storage:
    """The keys and values, and what computes over them."""

    rows: InputBatch
    kv_caches: KVCaches
    graphs: GraphRunner | None


class DraftModel:
    """A model that guesses the next tokens of rows of a batch, one after the other.

    Attributes:
        spec: Facts about it; its layers have one block table together.
        weight_bytes: Bytes that it reads for a token.
    """

    def __init__(self, model: CausalLM, spec: KVCacheSpec, weight_bytes: int, config: ModelRunnerConfig) -> None:
        self.spec = spec
        self.weight_bytes = weight_bytes
        self._model = model
        self._config = config
        self._storage: _Storage | None = None

    @property
    def bytes_per_block(self) -> int:
        """Bytes of the keys and values of one block."""
        return sum(group.bytes_per_block for group in self.spec.kv_groups)

    @property
    def max_model_len(self) -> int:
        """The longest request that it has positions for."""
        return self._config.max_model_len

    def allocate(self, batch: InputBatch, group: int, num_blocks: int, device: torch.device) -> None:
        """Allocates its storage for rows of the batch, whose tables of this group keep the whole context."""
        self._model.hold_positions(min(self.max_model_len, num_blocks * batch.block_size))
        layer_to_tensors: dict[int, tuple[torch.Tensor, ...]] = {}
        for own in self.spec.kv_groups:
            layer = [(tensor.shape, getattr(torch, tensor.dtype)) for tensor in own.tensors]
            tensors = allocate_block_storage([layer] * len(own.layers), num_blocks, device)
            layer_to_tensors.update(zip(own.layers, tensors, strict=True))
        kv_caches = [layer_to_tensors[layer] for layer in range(self.spec.num_layers)]
        graphs = None
        if device.type == "cpu" and not self._config.enforce_eager:
            graphs = GraphRunner(self._model, kv_caches, batch.block_tables.shape[2])
        self._storage = _Storage(batch.for_drafts(group), kv_caches, graphs)
        self.next_tokens(np.array([0]), np.array([0]), np.array([1]))  # before the first request needs it

    def release(self) -> None:
        """Frees its keys and values; `allocate` may follow."""
        self._storage = None

    @torch.inference_mode()
    def next_tokens(self, rows: IntArray, starts: IntArray, counts: IntArray) -> IntArray:
        """Computes tokens [start, start + count) of each row, and returns the likeliest one after each of these."""
        storage = self._storage
        if storage is None:
            raise RuntimeError("the draft model has no storage")
        if storage.graphs is not None and int(counts.max()) <= _MAX_REPLAYED_TOKENS:
            step = _rows_of(np.repeat(rows, counts), ragged_aranges(starts, counts), np.ones(counts.sum(), np.int64))
            decoded = storage.graphs.run(storage.rows, step) if storage.graphs.can_run(step.num_tokens) else None
            if decoded is not None and decoded.greedy_arrays is not None:
                found: IntArray = decoded.greedy_arrays[1][np.cumsum(counts) - 1]
                return found
        step = _rows_of(rows, starts, counts)
        inputs = prepare_inputs(storage.rows, step, torch.device(self.spec.device))
        logits = compute(self._model, storage.rows, step, inputs, storage.kv_caches, NO_HEADS).logits
        if logits is None:
            raise RuntimeError("the draft model has computed no logits")
        best: IntArray = argmax(logits)[1].cpu().numpy().astype(np.int64)
        return best


def load_draft_model(config: ModelRunnerConfig, device: torch.device) -> DraftModel:
    """Reads the weights of the draft model that `config` names, or generates dummy weights.

    Raises:
        ModelFilesError: A file of the model is missing or damaged.
        ValueError: The model is not supported, or cannot make drafts; the message is one sentence.
        EngineStartError: The device cannot hold the weights.
    """
    own = config.of_draft_model()
    try:
        loaded = load_served_model(own, device, Sharding())
    except ValueError as error:
        raise ValueError(f"draft model {config.draft_model_path}: {error}") from error
    if not isinstance(loaded.model, CausalLM) or loaded.model.cross_kv is not None:
        raise ValueError(f"draft model {config.draft_model_path}: it is no model that continues text")
    if loaded.spec.state_group is not None:
        raise ValueError(
            f"draft model {config.draft_model_path}: its layers keep a state of all tokens, which no wrong draft could "
            "be taken back from; a draft model with attention in all layers is needed"
        )
    return DraftModel(loaded.model, loaded.spec, loaded.weight_bytes, own)


def _rows_of(rows: IntArray, starts: IntArray, counts: IntArray) -> StepRows:
    none = np.zeros_like(counts)
    return StepRows([""] * len(rows), rows, starts, counts, none, none, int(counts.sum()))
