"""Encoders of transformers, for pictures that no encoder here covers.

The text model is another one, of whichever code runs it. Of the whole class only the tower and what joins it to the
text model are built, and `get_image_features` is called.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from llmstack_media import ImageLayout, ImageProcessor, LlavaNextImageProcessor, Processors, VideoProcessor
from llmstack_media.processors.fixed_size import FixedSizeProcessor
from llmstack_media.processors.gemma4 import Gemma4ImageProcessor
from llmstack_media.processors.got_ocr2 import GotOcr2ImageProcessor
from llmstack_media.processors.pixtral import PixtralImageProcessor
from llmstack_model_runner.encoders.image_encoder import ImageEncoder
from llmstack_model_runner.encoders.several import SeveralEncoders
from llmstack_model_runner.media.encoder import EncoderState
from llmstack_model_runner.models.transformers_backend.encoder_part import EncoderPart, PartEncoder
from llmstack_model_runner.models.transformers_backend.resolve import resolve_whole
from llmstack_model_runner.models.transformers_backend.sounds import TransformersSounds
from llmstack_types import MediaItem

_OWN_SHAPE = (Gemma4ImageProcessor, PixtralImageProcessor)
_CROPS = (FixedSizeProcessor, GotOcr2ImageProcessor, LlavaNextImageProcessor)
_SMALL = (64, 64)
"""Width and height of the picture of the trial."""


class TransformersEncoder(PartEncoder, ImageEncoder):
    """The encoder of a class of transformers, run some layers at a time where it allows that."""

    prefixes: ClassVar[tuple[str, ...]] = ()
    _noun = "a picture"

    def __init__(
        self, whole: Mapping[str, Any], text_size: int, processor: ImageProcessor, dtype: torch.dtype,
        device: torch.device,
    ) -> None:  # fmt: skip
        config, model_class = resolve_whole(whole)
        if getattr(config, "audio_config", None) is not None:
            config.audio_config = None  # its tower is no part of this encoder
        self._part = part = EncoderPart(config, model_class, dtype)
        if not isinstance(processor, (*_CROPS, *_OWN_SHAPE)):
            raise part.unsupported(f"pictures of {processor.name} do not reach its encoder")
        # Where the text model asks for it, the vectors of a picture attend to each other.
        self.is_atomic = getattr(config.text_config, "use_bidirectional_attention", None) == "vision"
        widths = (_size(config.vision_config, "hidden_size"), _size(config.vision_config, "intermediate_size"))
        super().__init__(processor, part.depth, widths, dtype, device)
        self.slice_units = 0  # layers are computed whole
        self._processor, self._text_size = processor, text_size

    def take_videos(self, processor: VideoProcessor) -> None:
        """Lets items be videos of LLaVA-OneVision, whose frames have the size of a tile.

        Raises:
            ValueError: They have another size.
        """
        if processor.largest().shape[1:] != self._largest["image"].shape[1:]:
            raise self._part.unsupported("frames of its videos are not as large as tiles of its pictures")
        self._take("video", processor)

    def _sample(self) -> tuple[MediaItem, int]:
        """A small black picture."""
        layout = self._processor.layout(*_SMALL)
        return MediaItem(b"", "image", 0, layout.num_vectors, (), layout.grid, layout.num_units), layout.num_bytes

    def _work_bytes_of(self, layout: ImageLayout) -> int:
        """The memory as of every encoder, with states between layers, and scores of patches where all are computed."""
        crops = layout.shape[0]
        numbers = layout.num_units * self._depth * self._widths[0] + 2 * layout.num_units**2 // crops
        return super()._work_bytes_of(layout) + numbers * self._dtype.itemsize

    def _shape(self, item: MediaItem) -> tuple[int, ...]:
        largest = self._largest["image"].shape
        if not isinstance(self._processor, _OWN_SHAPE):
            return (item.layout[0] if item.layout else 0, *largest[1:])
        if len(item.layout) != 3:
            return (0,)
        return (item.layout[0], 3, *(count * self._processor.patch_size for count in item.layout[1:]))

    def _enter(self, item: MediaItem, values: torch.Tensor) -> EncoderState:
        return (values,)

    def _features(self, item: MediaItem, values: torch.Tensor) -> torch.Tensor:
        if item.kind == "video":
            found = self._part.model.get_video_features(pixel_values_videos=values[None]).pooler_output
        else:
            found = self._part.model.get_image_features(**self._inputs(item, values)).pooler_output
        parts = [found] if isinstance(found, torch.Tensor) else [*found]
        return torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])

    def _inputs(self, item: MediaItem, values: torch.Tensor) -> dict[str, torch.Tensor]:
        if isinstance(self._processor, Gemma4ImageProcessor):
            return _in_patches(values, self._processor.patch_size)
        if isinstance(self._processor, PixtralImageProcessor):
            return {"pixel_values": values, "image_sizes": torch.tensor([values.shape[2:]], device=self._device)}
        if isinstance(self._processor, LlavaNextImageProcessor):
            sizes = torch.tensor([item.layout[1:]], device=self._device)
            return {"pixel_values": values[None], "image_sizes": sizes}
        return {"pixel_values": values}


class BackendEncoders(SeveralEncoders):
    """The encoder of pictures, and that of sound where the checkpoint has one."""

    @classmethod
    def of(
        cls, whole: Mapping[str, Any], text_size: int, found: Processors, dtype: torch.dtype, device: torch.device
    ) -> Any:
        """The encoders of pictures and of sound; of pictures alone for a checkpoint without sound."""
        pictures = TransformersEncoder.of(whole, text_size, found, dtype, device)
        if found.audio is None:
            return pictures
        return cls((pictures, TransformersSounds.of(whole, text_size, found, dtype, device)), device)


def _in_patches(values: torch.Tensor, size: int) -> dict[str, torch.Tensor]:
    """A picture [1, 3, height, width] in rows of patches with their channels last, and the places of these."""
    _, _, height, width = values.shape
    rows, columns = height // size, width // size
    patches = values.view(3, rows, size, columns, size).permute(1, 3, 2, 4, 0).reshape(1, rows * columns, -1)
    row, column = torch.meshgrid(*(torch.arange(one, device=values.device) for one in (rows, columns)), indexing="ij")
    return {"pixel_values": patches, "image_position_ids": torch.stack((column, row), dim=-1).view(1, -1, 2)}


def _size(config: Any, name: str) -> int:
    found = getattr(config, name, None)
    if not isinstance(found, int) or found < 1:
        raise ValueError(f"config.json: vision_config.{name} must be a positive integer.")
    return found
