"""The items of a step's rows: tokens with their vectors, and rows that fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import cast

import numpy as np
import torch

from llmstack_model_runner.layers.step_vectors import Block, StepVectors
from llmstack_model_runner.media.cross_store import CrossModel, CrossStore
from llmstack_model_runner.media.store import MediaStore, MediaWorkError
from llmstack_model_runner.memory.sizing import cached_vectors
from llmstack_model_runner.models.base import Model
from llmstack_model_runner.steps.input_batch import InputBatch, StepRows
from llmstack_types import KVCacheSpec, MediaItem, ModelRunnerConfig, SchedulerOutput


class StepMedia:
    """Joins the items of a batch's rows with what was encoded of them.

    Attributes:
        cross: What layers with cross attention attend to; None for a model without.
    """

    def __init__(self, batch: InputBatch, store: MediaStore) -> None:
        self._batch = batch
        self._store = store
        self.cross: CrossStore | None = store.cross

    def with_places(self, step: StepRows) -> StepRows:
        """The step with the place of what each row attends to; O(rows). Rows of a warm-up attend to whatever is there.

        Raises:
            MediaWorkError: An item is not encoded.
            ValueError: The model has no cross attention.
        """
        cross = self.cross
        if cross is None:
            raise ValueError("the model has no cross attention")
        places = np.zeros(len(step.rows), dtype=np.int64)
        for index, row in enumerate(step.rows.tolist()):
            for media_id, _ in self._batch.media.get(row, ()):
                place = cross.place_of(media_id)
                if place is None:
                    raise MediaWorkError(f"a row attends to item {media_id}, which was not encoded")
                places[index] = place
        return replace(step, places=places)

    def follow(self, scheduled: SchedulerOutput) -> None:
        """Drops and encodes what the step says.

        Raises:
            MediaWorkError: A part does not follow what was done of its item.
        """
        self._store.free(scheduled.freed_media)
        self._store.run(scheduled.encoder_work)

    def find_vectors(self, step: StepRows) -> StepVectors | None:
        """The vectors that stand in place of tokens of the step, None if there are none; O(rows and items).

        Those of an item that failed are NaN. Such rows are not computed, unless several ranks compute them: then
        whatever one rank alone failed at becomes an error of the row in all of them.

        Raises:
            MediaWorkError: An item is not encoded yet.
        """
        if self._store.cross is not None:
            return None
        self._move_positions(step)
        places: list[torch.Tensor] = []
        axes: list[torch.Tensor] = []
        vectors: list[torch.Tensor] = []
        blocks: list[Block] = []
        first_tokens = np.cumsum(step.num_scheduled_tokens) - step.num_scheduled_tokens
        for index, media_id, item in self._items_of(step):
            start = int(step.num_computed_tokens[index])
            end = start + int(step.num_scheduled_tokens[index])
            shift = int(first_tokens[index]) - start  # from a place in the prompt to one in the step
            for run_start, run_end, first in _overlaps(item, start, end):
                places.append(torch.arange(run_start + shift, run_end + shift))
                vectors.append(self._store.vectors(media_id, first, run_end - run_start))
                if self._batch.moved:
                    axes.append(self._axes_of(int(step.rows[index]), item, run_start, run_end))
                if self._store.is_atomic and item.kind in ("image", "video"):
                    blocks.append(Block(index, run_start + shift, run_start, run_end))
        if not places:
            return None
        joined, *deep = torch.cat(vectors).split(self._store.size, dim=1)
        on_axes = torch.cat(axes, dim=1).to(joined.device) if axes else None
        return StepVectors(torch.cat(places).to(joined.device), joined, tuple(blocks), on_axes, tuple(deep))

    def _move_positions(self, step: StepRows) -> None:
        """Notes where rows' positions are not their places, once for each row."""
        moved = self._batch.moved
        for row in step.rows.tolist():
            items = self._batch.media.get(row)
            if items is None or row in moved:
                continue
            found = [(item, self._store.positions(item)) for _, item in items]
            spans = [span for item, axes in found if axes is not None for span in _moves(item, axes)]
            if spans:
                moved.set_row(row, spans)

    def _axes_of(self, row: int, item: MediaItem, start: int, end: int) -> torch.Tensor:
        """Positions on three axes of places [start, end), which are of the item: [3, end - start]."""
        first = int(self._batch.moved.of_tokens(np.array([row]), np.array([item.offset]))[0])
        axes = self._store.positions(item)
        if axes is None:
            return torch.arange(start - item.offset + first, end - item.offset + first).expand(3, -1)
        return axes[:, start - item.offset : end - item.offset] + first

    def find_failures(self, step: StepRows) -> dict[int, str]:
        """Indices of rows that need an item without vectors, to the text of their error."""
        failures = self._store.failures
        if not failures:
            return {}
        return {index: failures[media_id] for index, media_id, _ in self._items_of(step) if media_id in failures}

    def _items_of(self, step: StepRows) -> Iterator[tuple[int, int, MediaItem]]:
        """The index of a row, and the number of an item that it reads: with places among its tokens in the step."""
        ends = step.num_computed_tokens + step.num_scheduled_tokens
        for index, row in enumerate(step.rows.tolist()):
            for media_id, item in self._batch.media.get(row, ()):
                is_near = item.offset < ends[index] and item.end > step.num_computed_tokens[index]
                if is_near or self._store.cross is not None:
                    yield index, media_id, item


def _moves(item: MediaItem, axes: torch.Tensor) -> Iterator[tuple[int, int]]:
    """The places where text goes on inside an item or behind it, and by how much each moves positions further."""
    before = 0
    for start, length in item.embed_runs or ((0, item.num_tokens),):
        end = start + length
        moved = int(axes[:, :end].max()) + 1 - end - before
        yield item.offset + end, moved
        before += moved


def _overlaps(item: MediaItem, start: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Runs of a prompt's tokens [start, end) that have vectors of an item, each as start, end and its first vector."""
    first = 0
    for run_start, length in item.embed_runs or ((0, item.num_tokens),):
        low = max(item.offset + run_start, start)
        high = min(item.offset + run_start + length, end)
        if low < high:
            yield low, high, first + low - item.offset - run_start
        first += length


def make_media(
    batch: InputBatch,
    model: Model,
    config: ModelRunnerConfig,
    spec: KVCacheSpec,
    device: torch.device,
    make_room: Callable[[], None],
    *,
    is_first: bool,
) -> StepMedia:
    """The items of a batch; see `MediaStore` for `make_room` and `is_first`."""
    size, dtype = model.item_size or 0, getattr(torch, spec.dtype)
    cross = None
    if model.cross_kv is not None:
        num_vectors = cached_vectors(config, spec)
        cross = CrossStore(cast("CrossModel", model), model.cross_kv, num_vectors, dtype, device)
    store = MediaStore(model.media_encoder(), size, dtype, device, make_room, is_first=is_first, cross=cross)
    return StepMedia(batch, store)
