"""Captured decode steps on a CPU, one per number of rows, replayed natively."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from llmstack_kernels.argmax import argmax
from llmstack_kernels.native import library
from llmstack_kernels.native.capture import Arena, CapturedCalls, CaptureError, capture
from llmstack_model_runner.layers.sharding import StageLinks
from llmstack_model_runner.media.cross_store import CrossStore
from llmstack_model_runner.models.base import CausalLM
from llmstack_model_runner.models.kv_spec import KVCaches
from llmstack_model_runner.ragged import IntArray
from llmstack_model_runner.sampling import GreedyChoice, HostTokens
from llmstack_model_runner.steps.decode_buffers import DecodeBuffers
from llmstack_model_runner.steps.input_batch import InputBatch, StepRows

logger = logging.getLogger(__name__)

# With more rows, Python's time between operations is negligible.
_MAX_NUM_ROWS = 128


@dataclass(frozen=True, slots=True)
class DecodeOutput:
    """Results of a decode step, which the next one overwrites."""

    logits: torch.Tensor  # [num_rows, vocab_size] float32
    hidden: torch.Tensor  # [num_rows, hidden_size]
    greedy: GreedyChoice | None = None  # None without a head
    greedy_arrays: tuple[npt.NDArray[np.float32], IntArray] | None = None  # the same memory

    def greedy_tokens(self) -> HostTokens | None:
        """The sampled tokens of greedy rows whose logits are not changed; None without a head.

        It calls nothing of PyTorch, whose operations take some 50 µs each after the weights have passed through the
        caches.
        """
        if self.greedy_arrays is None:
            return None
        best, token_ids = self.greedy_arrays
        return HostTokens(token_ids, np.isfinite(best))


@dataclass(frozen=True, slots=True)
class _Graph:
    """A captured step: inputs are written to `buffers`, and a replay writes its results to `output`."""

    buffers: DecodeBuffers
    output: DecodeOutput
    calls: CapturedCalls

    def run(self, batch: InputBatch, step: StepRows) -> DecodeOutput:
        self.buffers.fill(batch, step)
        self.calls.replay()
        return self.output


class GraphRunner:
    """Captures and replays small decode steps of models that use native kernels only."""

    def __init__(
        self,
        model: CausalLM,
        kv_caches: KVCaches,
        max_num_blocks: int,
        *,
        has_head: bool = True,
        links: StageLinks | None = None,
        cross: CrossStore | None = None,
    ) -> None:
        """`max_num_blocks`: Length of the longest block table.

        `has_head`: Whether the model has logits; otherwise it is a stage of one, whose results are hidden states.
        `links`: From and to other stages, if there are any.
        `cross`: What rows attend to across; None for a model without cross attention.
        """
        self._cross = cross
        self._has_head = has_head
        self._links = links
        self._model = model
        self._kv_caches = kv_caches
        self._max_num_blocks = max_num_blocks
        self._graphs: dict[tuple[int, int], _Graph] = {}  # by numbers of rows and of layers that adapters update
        self._arena = Arena()
        self._reason_for_none = "" if library() is not None else "the native kernels are not built"

    def can_run(self, num_rows: int) -> bool:
        """Whether decode steps of so many rows are replayed, as far as is known."""
        return not self._reason_for_none and num_rows <= _MAX_NUM_ROWS

    def run(self, batch: InputBatch, step: StepRows, num_adapted: int = 0) -> DecodeOutput | None:
        """Runs a step in which each row computes its last token and samples; None if the step cannot be captured.

        `num_adapted`: Layers that adapters update; 0 if no row has one. Factors are read when a step is replayed.
        """
        num_rows = len(step.rows)
        graph = self._graphs.get((num_rows, num_adapted))
        if graph is not None:
            return graph.run(batch, step)
        if not self.can_run(num_rows):
            return None
        try:
            graph = self._capture(batch, step)
        except CaptureError as error:
            self._reason_for_none = str(error)
            logger.info("decode steps are not captured: %s", error)
            if self._links is not None:
                self._links.receive_again()  # the attempt has taken the step's states
            return None
        # Layers that are updated never get fewer, so steps with fewer of them do not come again.
        self._graphs = {key: old for key, old in self._graphs.items() if not 0 < key[1] < num_adapted}
        self._graphs[num_rows, num_adapted] = graph
        return graph.output

    def describe(self) -> str:
        if self._reason_for_none:
            return f"not captured: {self._reason_for_none}"
        return f"captured and replayed natively up to {_MAX_NUM_ROWS} rows"

    @torch.inference_mode()
    def _capture(self, batch: InputBatch, step: StepRows) -> _Graph:
        buffers = DecodeBuffers(batch, len(step.rows), self._max_num_blocks, self._cross)
        buffers.fill(batch, step)
        own = buffers.inputs
        with capture(self._arena) as calls:
            hidden = self._model.forward(own.token_ids, own.positions, own.attention_metadata, self._kv_caches)
            logits = self._model.compute_logits(hidden) if self._has_head else hidden
            greedy = argmax(logits) if self._has_head else None
        arrays = None if greedy is None else (greedy[0].numpy(), greedy[1].numpy())
        return _Graph(buffers, DecodeOutput(logits, hidden, greedy, arrays), calls)
