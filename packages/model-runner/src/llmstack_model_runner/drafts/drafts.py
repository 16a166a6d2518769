"""The draft tokens of a step, made by a model before the step is computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from llmstack_model_runner.drafts.by_head import DraftsByHead
from llmstack_model_runner.drafts.by_model import DraftsByModel
from llmstack_model_runner.drafts.draft_model import load_draft_model
from llmstack_model_runner.drafts.guesser import OwnLayer
from llmstack_model_runner.drafts.load_heads import load_draft_heads
from llmstack_model_runner.drafts.maker import DraftMaker
from llmstack_model_runner.layers.sharding import Sharding
from llmstack_model_runner.models import CausalLM, Model
from llmstack_model_runner.ragged import IntArray
from llmstack_model_runner.steps.computation import MakeTokenMasks
from llmstack_model_runner.steps.input_batch import InputBatch, StepRows
from llmstack_types import KVCacheSpec, ModelRunnerConfig, SchedulerOutput
from llmstack_types.token_masks import MakeTokenMasks as MakeMasksWithDrafts


class Drafts:
    """Fills the drafts of a step in; without a model it leaves every step as it is.

    The first of the ranks that share every layer has the draft model, and tells the others what it has guessed. Of a
    draft head each has its part.
    """

    def __init__(self, config: ModelRunnerConfig, device: torch.device, sharding: Sharding) -> None:
        """Before anything is loaded."""
        self._config, self._device, self._sharding = config, device, sharding
        self._maker: DraftMaker | None = None
        self._batch: InputBatch | None = None

    def load_model(self) -> None:
        """Reads the draft model, if there is one and this rank has it.

        Raises:
            ModelFilesError, ValueError, EngineStartError: As `load_draft_model`.
        """
        if self._config.draft_model_path and not self._config.draft_head and self._sharding.rank == 0:
            self._maker = DraftsByModel(load_draft_model(self._config, self._device), self._config)

    def without_weights(self) -> Drafts:
        """Drafts of the same kind before the weights are read."""
        return Drafts(self._config, self._device, self._sharding)

    def beside(self, model: Model, spec: KVCacheSpec, weight_bytes: int) -> KVCacheSpec:
        """The spec of the served model with what makes its drafts; `weight_bytes` are those of the served model.

        Raises:
            ValueError: There are no drafts for that model; the message is one sentence.
        """
        if not self._config.makes_drafts:
            return spec
        if not isinstance(model, CausalLM) or model.cross_kv is not None:
            raise ValueError("drafts by a model need a served model that continues text")
        _whole_context(spec)
        if self._config.draft_head == "mtp":
            self._maker = DraftsByHead(OwnLayer(model), spec, self._config)
        elif self._config.draft_head:
            self._maker = load_draft_heads(self._config, model, spec, self._device, self._sharding)
        if self._maker is None:
            return spec
        self._maker.check(spec)
        size = self._maker.bytes_per_block
        return replace(
            spec, bytes_per_block=spec.bytes_per_block + size, draft_bytes_per_block=size,
            draft_cost=self._maker.cost(weight_bytes),
        )  # fmt: skip

    def allocate(self, batch: InputBatch, spec: KVCacheSpec, num_blocks: int) -> None:
        """Allocates what the drafts of the rows of a batch need, beside so many blocks."""
        if not self._config.makes_drafts:
            return
        self._batch, group = batch, _whole_context(spec)
        if self._maker is not None:
            self._maker.allocate(batch, group, num_blocks, self._device)

    def release(self) -> None:
        """Frees that; `allocate` may follow."""
        self._batch = None
        if self._maker is not None:
            self._maker.release()

    def forget_blocks(self, block_ids: Sequence[int]) -> None:
        """Blocks were written from elsewhere."""
        if self._maker is not None:
            self._maker.forget_blocks(list(block_ids))

    def run_largest(self) -> None:
        """Computes the step that needs the most memory, with a storage that few blocks suffice for."""
        if self._maker is not None:
            self._maker.run_largest()

    def fill(
        self, scheduled: SchedulerOutput, step: StepRows, token_masks: MakeMasksWithDrafts | None
    ) -> tuple[StepRows, MakeTokenMasks | None]:
        """The step with its drafts in the batch, and what makes the masks for them.

        Rows that no draft could be made for have fewer, or none. The batch has the rows of the step already.
        """
        if self._batch is None:
            return step, token_masks
        if self._maker is not None:
            self._maker.follow(scheduled, step)
        if not step.has_drafts:
            return step, token_masks
        indices = np.flatnonzero(step.num_drafts)
        rows, wanted = step.rows[indices], step.num_drafts[indices]
        made = np.full((len(rows), int(wanted.max())), -1) if self._maker is None else self._maker.make(rows, wanted)
        drafts = made if self._config.draft_head else self._agree(made)
        num_made = (drafts >= 0).sum(axis=1)
        self._place(rows, drafts, num_made)
        num_missing = np.zeros_like(step.num_drafts)
        num_missing[indices] = step.num_drafts[indices] - num_made
        filled = replace(
            step, num_drafts=step.num_drafts - num_missing,
            num_scheduled_tokens=step.num_scheduled_tokens - num_missing,
            num_tokens=step.num_tokens - int(num_missing.sum()),
        )  # fmt: skip
        if token_masks is None:
            return filled, None
        columns = zip(indices.tolist(), drafts.tolist(), num_made.tolist(), strict=True)
        drafts_made = {step.request_ids[index]: token_ids[:count] for index, token_ids, count in columns}
        return filled, partial(token_masks, drafts_made)

    def _agree(self, drafts: IntArray) -> IntArray:
        """The drafts of the rank that has the draft model, which all ranks verify."""
        if self._sharding.size == 1:
            return drafts
        shared = torch.from_numpy(drafts + 1 if self._maker is not None else np.zeros_like(drafts))
        summed = self._sharding.all_reduce(shared.to(torch.float32).to(self._device))  # exact below 2**24
        agreed: IntArray = summed.to("cpu", torch.int64).numpy() - 1
        return agreed

    def _place(self, rows: IntArray, drafts: IntArray, num_made: IntArray) -> None:
        if self._maker is not None or self._batch is None:
            return
        for place in range(drafts.shape[1]):
            own = num_made > place
            self._batch.token_ids[rows[own], self._batch.num_tokens[rows[own]] + place] = drafts[own, place]


def _whole_context(spec: KVCacheSpec) -> int:
    """The group of layers whose block tables keep the whole context.

    Raises:
        ValueError: There is none.
    """
    windows = [group.sliding_window for group in spec.kv_groups] or [None]
    if None not in windows:
        raise ValueError(
            "all layers of the served model have a sliding window, and a draft model needs all blocks: start with "
            "--disable-hybrid-kv-cache-manager"
        )
    return windows.index(None)
