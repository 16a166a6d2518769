"""Keys and values of encoded items, to which the layers of a decoder attend."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from llmstack_kv_cache.storage import allocate_block_storage
from llmstack_model_runner.layers.attention_metadata import CrossRows
from llmstack_model_runner.layers.cross_attention import CrossKVSpec
from llmstack_model_runner.ragged import IntArray

_DEVICE_BLOCK_SIZE = 16


class CrossModel(Protocol):
    """A decoder with cross attention."""

    def cross_keys_and_values(self, encoded: torch.Tensor) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values of an item in each layer: each [num_heads, num_vectors, head_dim]."""
        ...


class CrossStore:
    """Places for the keys and values of some items, each written once, in blocks as kernels for paged attention read.

    On a CPU an item is one block; elsewhere kernels ask for short ones. A short item does not fill its place.
    """

    def __init__(
        self, model: CrossModel, spec: CrossKVSpec, num_vectors: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """`num_vectors`: Of all items together, as the scheduler counts them."""
        self._model = model
        self._length = spec.num_vectors
        block_size = self._length if device.type == "cpu" else _DEVICE_BLOCK_SIZE
        self._num_blocks = -(-self._length // block_size)
        self._device = device
        num_places = max(num_vectors // self._length, 1)
        block = ((spec.num_heads, block_size, spec.head_dim), dtype)
        layers = [[block, block]] * spec.num_layers
        self.caches = allocate_block_storage(layers, num_places * self._num_blocks, device)
        self._free = list(range(num_places - 1, -1, -1))  # popped from the end
        self._lengths = np.full(num_places, self._length, dtype=np.int32)  # vectors of the item in each place
        self._id_to_place: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._id_to_place)

    def place_of(self, media_id: int) -> int | None:
        """The place of an item; None if it is not encoded."""
        return self._id_to_place.get(media_id)

    def keep(self, media_id: int, encoded: torch.Tensor) -> None:
        """Writes an item's keys and values, from the encoder's output [num_vectors, size]."""
        place = self._take(media_id)
        self._lengths[place] = len(encoded)
        for (keys, values), (own_keys, own_values) in zip(
            self.caches, self._model.cross_keys_and_values(encoded), strict=True
        ):
            self._write(keys, place, own_keys)
            self._write(values, place, own_values)

    def keep_failed(self, media_id: int) -> None:
        """An item that could not be encoded here: whatever row attends to it fails."""
        place = self._take(media_id)
        for tensors in self.caches:
            for tensor in tensors:
                tensor[self._blocks_of(place)] = torch.nan

    def free(self, media_id: int) -> None:
        """Drops an item, if it is there."""
        place = self._id_to_place.pop(media_id, None)
        if place is not None:
            self._free.append(place)

    def rows(self, places: IntArray) -> CrossRows:
        """The rows of a step's tokens, whose items are at these places [num_tokens]."""
        count = len(places)
        starts = torch.arange(count + 1, dtype=torch.int32)
        seq_lens = torch.from_numpy(self._lengths[places])
        tables = torch.from_numpy(self._tables(places))
        return CrossRows(
            self.caches, starts.to(self._device), seq_lens.to(self._device), tables.to(self._device),
            starts.tolist(), seq_lens.tolist(),
        )  # fmt: skip

    def fill(self, rows: CrossRows, places: IntArray) -> None:
        """Writes other places of as many tokens into rows on a CPU."""
        rows.block_tables.numpy()[:] = self._tables(places)
        rows.seq_lens.numpy()[:] = self._lengths[places]

    def _tables(self, places: IntArray) -> npt.NDArray[np.int32]:
        tables: IntArray = places[:, None] * self._num_blocks + np.arange(self._num_blocks)
        return tables.astype(np.int32)

    def _take(self, media_id: int) -> int:
        place = self._id_to_place.get(media_id)
        if place is None:
            place = self._id_to_place[media_id] = self._free.pop()
        return place

    def _blocks_of(self, place: int) -> slice:
        return slice(place * self._num_blocks, (place + 1) * self._num_blocks)

    def _write(self, storage: torch.Tensor, place: int, rows: torch.Tensor) -> None:
        """Copies [num_heads, num_vectors, head_dim] into the blocks of a place."""
        blocks = storage[self._blocks_of(place)]  # [num_blocks, num_heads, block_size, head_dim]
        size = blocks.shape[2]
        for number, block in enumerate(blocks):
            part = rows[:, number * size : (number + 1) * size]
            block[:, : part.shape[1]].copy_(part)
