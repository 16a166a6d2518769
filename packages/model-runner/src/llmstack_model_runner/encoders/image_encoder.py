"""Base of encoders of pictures and videos: values out of bytes, and limits."""

from __future__ import annotations

import math
import re
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, Protocol, Self

import torch

from llmstack_media import ImageLayout, ImageProcessor, Piece, PixelProcessor, Processors, VideoProcessor
from llmstack_model_runner.encoders.layer_run import LayerRun
from llmstack_model_runner.encoders.prompt_encoder import PromptEncoder
from llmstack_model_runner.media.encoder import EncoderState
from llmstack_types import MediaItem
from llmstack_types.vocabulary import MediaKind

_SPECIAL_TOKEN = re.compile(r"<[^<>\s]+>|\[[A-Z_]+\]")
_HIDDEN_COPIES = 6
"""Tensors of the width of a hidden state that a layer holds at once, queries, keys and values among them."""

_NOUNS: Mapping[MediaKind, str] = {"image": "a picture", "video": "a video"}


class CropTower(Protocol):
    """Layers over crops, each of which attends by itself."""

    def enter(self, values: torch.Tensor) -> torch.Tensor:
        """The hidden states before the first layer, those of all crops one after the other."""
        ...

    def layer(self, number: int, num_rows: int) -> LayerRun:
        """A layer over so many states."""
        ...


class ImageEncoder(PromptEncoder):
    """A tower over pictures and the connector behind it."""

    def __init__(
        self, processor: ImageProcessor, num_layers: int, widths: tuple[int, int], dtype: torch.dtype,
        device: torch.device,
    ) -> None:  # fmt: skip
        """`widths`: Of a hidden state and of the feed-forward inside a layer."""
        super().__init__(device)
        self._device, self._dtype, self._widths, self._depth = device, dtype, widths, num_layers
        self._tables: dict[MediaKind, torch.Tensor] = {}
        self.num_layers: dict[MediaKind, int] = {}
        self.max_num_tokens: dict[MediaKind, int] = {}
        self._largest: dict[MediaKind, ImageLayout] = {}
        self._take("image", processor)

    @classmethod
    def of(
        cls, whole: Mapping[str, Any], text_size: int, found: Processors, dtype: torch.dtype, device: torch.device
    ) -> Self:
        make: Any = cls  # whose arguments are those of every family
        made: Self = make(whole, text_size, found.pictures, dtype, device)
        if found.video is not None:
            made.take_videos(found.video)
        return made

    def take_videos(self, processor: VideoProcessor) -> None:
        """Lets items be videos, as the processor prepares them. Only some families have both.

        Raises:
            ValueError: Its patches do not fit this encoder.
        """
        raise ValueError(f"This encoder takes no videos, and {processor.name} prepares some.")

    def _take(self, kind: MediaKind, processor: PixelProcessor[Any]) -> None:
        """Adds a kind of items: its values, and what the largest one needs."""
        self._largest[kind] = largest = processor.largest()
        self._tables[kind] = torch.from_numpy(processor.value_table()).to(self._dtype).to(self._device).flatten()
        self.num_layers[kind] = self._depth
        self.max_num_tokens[kind] = num_places(processor.placeholders(largest))

    @property
    def work_bytes(self) -> int:
        """The most that an item of any kind needs, as `MediaEncoder` says it."""
        return max(map(self._work_bytes_of, self._largest.values()))

    def _work_bytes_of(self, layout: ImageLayout) -> int:
        item_bytes = self._dtype.itemsize
        return (
            layout.num_units * (_HIDDEN_COPIES * self._widths[0] + self._widths[1]) * item_bytes
            + layout.num_bytes * (1 + 4 + 2 * item_bytes)  # bytes, places in the table, values and patches
        )

    @abstractmethod
    def _shape(self, item: MediaItem) -> tuple[int, ...]:
        """The shape of an item's bytes; the second dimension is the channel. ValueError if the layout is none."""

    @abstractmethod
    def _enter(self, item: MediaItem, values: torch.Tensor) -> EncoderState:
        """The input of the first layer, from values of the shape of the item's bytes."""

    def begin(self, item: MediaItem, data: bytearray) -> EncoderState:
        """The patches as vectors, with their positions."""
        shape = self._shape(item)
        if not data or math.prod(shape) != len(data):
            raise ValueError(f"{len(data)} bytes are not {_NOUNS[item.kind]} of shape {list(shape)}")
        pixels = torch.frombuffer(data, dtype=torch.uint8).view(shape).to(self._device)
        channels = torch.arange(0, 3 * 256, 256, dtype=torch.int32, device=self._device)
        places = pixels.to(torch.int32) + channels.view(1, 3, *[1] * (len(shape) - 2))
        return self._enter(item, self._tables[item.kind].index_select(0, places.flatten()).view(shape))


class CropEncoder(ImageEncoder):
    """An encoder of crops of one shape; the layout of an item begins with their number."""

    def __init__(
        self, processor: ImageProcessor, num_layers: int, widths: tuple[int, int], dtype: torch.dtype,
        device: torch.device,
    ) -> None:  # fmt: skip
        super().__init__(processor, num_layers, widths, dtype, device)
        self._crop_shape = processor.largest().shape[1:]

    def _shape(self, item: MediaItem) -> tuple[int, ...]:
        return (item.layout[0] if item.layout else 0, *self._crop_shape)


class EachCropEncoder(CropEncoder):
    """An encoder whose tower reads crops and nothing else. Subclasses set `_tower`."""

    _tower: CropTower

    def _enter(self, item: MediaItem, values: torch.Tensor) -> EncoderState:
        return (self._tower.enter(values),)

    def _layer(self, item: MediaItem, state: EncoderState, number: int) -> LayerRun:
        return self._tower.layer(number, len(state[0]))


def num_places(pieces: tuple[Piece, ...]) -> int:
    """Upper bound of the tokens of what stands in for a picture: each special token is one, and each byte of text."""
    total = 0
    for piece in pieces:
        if piece.num_vectors:
            total += piece.num_vectors
        else:
            rest, num_special = _SPECIAL_TOKEN.subn("", piece.text)
            total += num_special + len(rest.encode())
    return total
