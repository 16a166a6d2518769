"""Vectors of items, and items that are being encoded."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from llmstack_model_runner.device.errors import is_device_failure, is_out_of_memory
from llmstack_model_runner.media.cross_store import CrossStore
from llmstack_model_runner.media.encoder import EncoderState, MediaEncoder
from llmstack_model_runner.media.memory import MediaUnreadableError, read_memory
from llmstack_types import EncoderWork, MediaItem, QuarantinedError
from llmstack_types.media import num_slices

logger = logging.getLogger(__name__)


class MediaWorkError(ValueError):
    """A step asks for a part of an item that does not follow what was done before."""


@dataclass(frozen=True, slots=True)
class _Begun:
    """An item between two of its encoder's layers."""

    item: MediaItem
    state: EncoderState
    num_layers_done: int


class MediaStore:
    """Numbers of items to their vectors; used by one thread.

    An item that cannot be encoded has an error in place of vectors, so that it costs those requests that use it and no
    others. A part that fails leaves the item as it was before, and parts that were done before are not done again: the
    work of a step may be run twice.

    Attributes:
        failures: Numbers of items that have no vectors, to the text that their requests end with.
        size: Width of a vector; `dtype` and `device` are theirs too.
        width: Of all that is kept of a place: its vector, and those for the first decoder layers.
    """

    def __init__(
        self,
        encoder: MediaEncoder | None,
        size: int,
        dtype: torch.dtype,
        device: torch.device,
        make_room: Callable[[], None],
        *,
        is_first: bool = True,
        cross: CrossStore | None = None,
    ) -> None:
        """`size`, `dtype` and `device` are those of the vectors; `make_room` frees memory after an allocation failed.

        `is_first`: Whether this stage embeds tokens. Others only see to it that items can be read.
        `cross`: Keeps what was encoded, where layers of every stage attend to it.
        """
        self.cross = cross
        self._encoder = encoder
        self.size, self.dtype, self.device = size, dtype, device
        self.width = size * (1 + (0 if encoder is None else encoder.num_deep))
        self._make_room = make_room
        self._is_first = is_first or cross is not None
        self._begun: dict[int, _Begun] = {}
        self._vectors: dict[int, torch.Tensor] = {}
        self.failures: dict[int, str] = {}

    @property
    def is_atomic(self) -> bool:
        """Whether tokens of one item attend to each other."""
        return self._encoder is not None and self._encoder.is_atomic

    def positions(self, item: MediaItem) -> torch.Tensor | None:
        """Positions of an item's tokens on three axes; see `MediaEncoder`."""
        return None if self._encoder is None or item.kind == "embeds" else self._encoder.positions(item)

    def __len__(self) -> int:
        return len(self._vectors) + len(self._begun) + (0 if self.cross is None else len(self.cross))

    def free(self, media_ids: Iterable[int]) -> None:
        """Drops the vectors and the work of these items."""
        for media_id in media_ids:
            self._vectors.pop(media_id, None)
            self._begun.pop(media_id, None)
            self.failures.pop(media_id, None)
            if self.cross is not None:
                self.cross.free(media_id)

    def vectors(self, media_id: int, first: int, count: int) -> torch.Tensor:
        """Some vectors [count, width] of an item that is complete; those of one that failed are NaN.

        A later stage gets empty vectors. It needs to know that a step has vectors, since such steps are not captured.

        Raises:
            MediaWorkError: It is not complete, or has fewer.
        """
        if not self._is_first:
            return torch.empty((count, 0))
        if media_id in self.failures:
            return torch.full((count, self.width), torch.nan, dtype=self.dtype, device=self.device)
        vectors = self._vectors.get(media_id)
        if vectors is None or len(vectors) < first + count:
            raise MediaWorkError(f"a row needs vectors of item {media_id} that were not encoded")
        return vectors[first : first + count]

    @torch.inference_mode()
    def run(self, parts: Iterable[EncoderWork]) -> None:
        """Encodes parts of items, one after the other.

        Raises:
            MediaWorkError: A part does not follow what was done of its item.
            Exception: The device has failed.
        """
        for work in parts:
            if self._is_done(work):
                continue
            error = self._attempt(work)
            if error == QuarantinedError.OUT_OF_MEMORY:
                self._make_room()  # only here, where no traceback refers to the part's tensors any more
                error = self._attempt(work)
            if error is not None:
                self.free([work.media_id])
                self.failures[work.media_id] = error
                if self.cross is not None:
                    self.cross.keep_failed(work.media_id)

    def _is_done(self, work: EncoderWork) -> bool:
        if work.media_id in self.failures or work.media_id in self._vectors:
            return True
        if self.cross is not None and self.cross.place_of(work.media_id) is not None:
            return True
        begun = self._begun.get(work.media_id)
        return begun is not None and work.first_layer + work.num_layers <= begun.num_layers_done

    def _attempt(self, work: EncoderWork) -> str | None:
        """Encodes a part; the text of the error if it failed."""
        try:
            self._encode(work)
        except MediaUnreadableError as error:
            logger.error("item %d cannot be read: %s", work.media_id, error)
            return QuarantinedError.MEDIA_UNREADABLE
        except Exception as error:  # any error of one item, which must not end the requests without it
            if isinstance(error, MediaWorkError) or is_device_failure(error):
                raise
            is_memory = is_out_of_memory(error)
            logger.error("item %d cannot be encoded: %s", work.media_id, error, exc_info=not is_memory)
            return QuarantinedError.OUT_OF_MEMORY if is_memory else QuarantinedError.MEDIA_NOT_ENCODABLE
        return None

    def _encode(self, work: EncoderWork) -> None:
        media_id, begun = work.media_id, self._begun.get(work.media_id)
        item = work.item if begun is None else begun.item
        if item is None or work.first_layer != (0 if begun is None else begun.num_layers_done):
            raise MediaWorkError(f"layer {work.first_layer} of item {media_id} does not follow what was done of it")
        if item.kind == "embeds":
            self._keep(media_id, self._given(item))
            return
        if self._encoder is None:
            raise MediaWorkError(f"item {media_id} is of kind {item.kind}, which the model does not encode")
        num_layers_done = work.first_layer + work.num_layers
        if not self._is_first:
            if begun is None:
                read_memory(item)
            self._begun[media_id] = _Begun(item, (), num_layers_done)
            return
        state = self._encoder.begin(item, read_memory(item)) if begun is None else begun.state
        state = self._encoder.run_layers(item, state, work.first_layer, work.num_layers)
        if num_layers_done < self._num_layers_of(item, self._encoder):
            self._begun[media_id] = _Begun(item, state, num_layers_done)
            return
        vectors = self._encoder.finish(item, state)
        num_vectors = item.num_vectors if self.cross is None else item.num_units
        if vectors.shape != (num_vectors, self.width):
            raise ValueError(f"vectors of shape {list(vectors.shape)} for {num_vectors} places")
        self._keep(media_id, vectors)
        self._begun.pop(media_id, None)

    @staticmethod
    def _num_layers_of(item: MediaItem, encoder: MediaEncoder) -> int:
        return encoder.num_layers[item.kind] * num_slices(item.num_units, encoder.slice_units)

    def _given(self, item: MediaItem) -> torch.Tensor:
        """The vectors of an item of the kind `embeds`, whose bytes they are."""
        data = read_memory(item)
        if len(data) != item.num_vectors * self.size * self.dtype.itemsize:
            raise ValueError(f"{len(data)} bytes are not {item.num_vectors} vectors of {self.size} numbers")
        given = torch.frombuffer(data, dtype=self.dtype).view(-1, self.size).to(self.device)
        return given if self.width == self.size else torch.nn.functional.pad(given, (0, self.width - self.size))

    def _keep(self, media_id: int, vectors: torch.Tensor) -> None:
        if not bool(vectors.isfinite().all()):
            raise ValueError("its vectors are not finite")
        if self.cross is not None:
            self.cross.keep(media_id, vectors)
        elif self._is_first:
            self._vectors[media_id] = vectors
