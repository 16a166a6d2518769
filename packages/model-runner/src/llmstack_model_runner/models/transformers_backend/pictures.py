"""Encoders of transformers, for pictures that no encoder here covers.

The text model is another one, of whichever code runs it. Of the whole class only the tower and what joins it to the
text model are built, and `get_image_features` is called.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import PreTrainedModel

from llmstack_media import ImageLayout, ImageProcessor, LlavaNextImageProcessor, VideoProcessor
from llmstack_media.processors.fixed_size import FixedSizeProcessor
from llmstack_media.processors.gemma4 import Gemma4ImageProcessor
from llmstack_media.processors.got_ocr2 import GotOcr2ImageProcessor
from llmstack_media.processors.pixtral import PixtralImageProcessor
from llmstack_model_runner.encoders.image_encoder import ImageEncoder
from llmstack_model_runner.encoders.layer_run import LayerRun
from llmstack_model_runner.layers.weight_slot import WeightKind, WeightSlot
from llmstack_model_runner.media.encoder import EncoderState
from llmstack_model_runner.models.transformers_backend.load import load_model, release_files
from llmstack_model_runner.models.transformers_backend.paused_layers import PausedLayers
from llmstack_model_runner.models.transformers_backend.resolve import (
    UnsupportedByTransformersError,
    build_on_meta,
    resolve_whole,
)
from llmstack_model_runner.models.transformers_backend.stored import Names
from llmstack_types import MediaItem

_TEXT_PARTS = ("model.language_model", "lm_head")
_OWN_SHAPE = (Gemma4ImageProcessor, PixtralImageProcessor)
_CROPS = (FixedSizeProcessor, GotOcr2ImageProcessor, LlavaNextImageProcessor)
_SMALL = (64, 64)
"""Width and height of the picture of the trial."""


class TransformersEncoder(ImageEncoder):
    """The encoder of a class of transformers, run some layers at a time where it allows that."""

    prefixes: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self, whole: Mapping[str, Any], text_size: int, processor: ImageProcessor, dtype: torch.dtype,
        device: torch.device,
    ) -> None:  # fmt: skip
        self._config, self._model_class = resolve_whole(whole)
        if not isinstance(processor, (*_CROPS, *_OWN_SHAPE)):
            raise self._unsupported(f"pictures of {processor.name} do not reach its encoder")
        if getattr(self._config, "audio_config", None) is not None:
            self._config.audio_config = None  # its tower is no part of this encoder
        vision = self._config.vision_config
        widths = (_size(vision, "hidden_size"), _size(vision, "intermediate_size"))
        self._config.tie_word_embeddings = False  # there is no head
        # Where the text model asks for it, the vectors of a picture attend to each other.
        self.is_atomic = getattr(self._config.text_config, "use_bidirectional_attention", None) == "vision"
        self._part_class = _without_text(self._model_class)
        built = build_on_meta(self._config, self._part_class, dtype, attention=None)
        self._names, self._shapes = Names(built), {name: tuple(x.shape) for name, x in built.state_dict().items()}
        super().__init__(processor, max(1, PausedLayers(built).depth), widths, dtype, device)
        self.slice_units = 0  # layers are computed whole
        self._processor, self._text_size = processor, text_size
        self._given: dict[str, torch.Tensor] = {}
        self._model: Any = None
        self._layers: PausedLayers

    def take_videos(self, processor: VideoProcessor) -> None:
        """Lets items be videos of LLaVA-OneVision, whose frames have the size of a tile.

        Raises:
            ValueError: They have another size.
        """
        if processor.largest().shape[1:] != self._largest["image"].shape[1:]:
            raise self._unsupported("frames of its videos are not as large as tiles of its pictures")
        self._take("video", processor)

    def _unsupported(self, reason: str) -> UnsupportedByTransformersError:
        return UnsupportedByTransformersError(self._model_class.__name__, reason)

    def slots(self) -> dict[str, WeightSlot]:
        return {
            name: WeightSlot(shape, functools.partial(self._given.__setitem__, name), _kind(name, shape))
            for name, shape in self._shapes.items()
        }

    def own_name(self, name: str) -> str | None:
        target, pattern = self._names.target(name)
        return target if target in self._shapes and pattern is None else None

    @torch.inference_mode()
    def finish_loading(self) -> None:
        """Loads through transformers, and encodes a small black picture.

        Raises:
            UnsupportedByTransformersError: What comes out are not the vectors that a prompt has places for.
        """
        given, self._given = self._given, {}
        self._model = load_model(
            self._config, self._part_class, given.items(), self._dtype, self._device, attention=None
        ).eval()
        release_files(self._model)
        self._layers = PausedLayers(self._model)
        layout = self._processor.layout(*_SMALL)
        item = MediaItem(b"", "image", 0, layout.num_vectors, (), layout.grid, layout.num_units)
        values = self.begin(item, bytearray(layout.num_bytes))[0]
        try:
            found = self._layers.try_out(lambda: self._features(item, values))
        except Exception as error:  # model code can raise anything if the configurations do not fit each other
            reason = f"encoding a picture raises {type(error).__name__}, {' '.join(str(error).split())[:200]}"
            raise self._unsupported(reason) from error
        wanted = (layout.num_vectors, self._text_size)
        if tuple(found.shape) != wanted:
            raise self._unsupported(f"a picture has {list(found.shape)} numbers instead of {list(wanted)}")

    def _work_bytes_of(self, layout: ImageLayout) -> int:
        """As every encoder, and besides the states between layers, and scores of patches where all are computed."""
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

    def _layer(self, item: MediaItem, state: EncoderState, number: int) -> LayerRun:
        raise NotImplementedError("layers are those of transformers")

    def run_layers(self, item: MediaItem, state: EncoderState, first: int, count: int) -> EncoderState:
        """The values, and the output of every layer so far."""
        values, *known = state
        return (values, *self._layers.run(lambda: self._features(item, values), known, first + count))

    def finish(self, item: MediaItem, state: EncoderState) -> torch.Tensor:
        """The vectors that `get_image_features` gives, in the order of their places."""
        values, *known = state
        return self._layers.finish(lambda: self._features(item, values), known)

    def _features(self, item: MediaItem, values: torch.Tensor) -> torch.Tensor:
        if item.kind == "video":
            found = self._model.get_video_features(pixel_values_videos=values[None]).pooler_output
        else:
            found = self._model.get_image_features(**self._inputs(item, values)).pooler_output
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


def _in_patches(values: torch.Tensor, size: int) -> dict[str, torch.Tensor]:
    """A picture [1, 3, height, width] in rows of patches with their channels last, and the places of these."""
    _, _, height, width = values.shape
    rows, columns = height // size, width // size
    patches = values.view(3, rows, size, columns, size).permute(1, 3, 2, 4, 0).reshape(1, rows * columns, -1)
    row, column = torch.meshgrid(*(torch.arange(one, device=values.device) for one in (rows, columns)), indexing="ij")
    return {"pixel_values": patches, "image_position_ids": torch.stack((column, row), dim=-1).view(1, -1, 2)}


def _without_text(model_class: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """The class without its text model and head, which are another model here."""

    class WithoutText(model_class):  # type: ignore[misc]  # the class is known when it is loaded
        def __init__(inner, config: Any, *args: Any, **options: Any) -> None:
            super().__init__(config, *args, **options)
            for name in _TEXT_PARTS:
                parent, _, attribute = name.rpartition(".")
                setattr(inner.get_submodule(parent), attribute, nn.Identity())

    # Tables of transformers have names by class, and leave out classes of other packages.
    WithoutText.__name__, WithoutText.__module__ = model_class.__name__, model_class.__module__
    WithoutText.__qualname__ = model_class.__qualname__
    return WithoutText


def _size(config: Any, name: str) -> int:
    found = getattr(config, name, None)
    if not isinstance(found, int) or found < 1:
        raise ValueError(f"config.json: vision_config.{name} must be a positive integer.")
    return found


def _kind(name: str, shape: tuple[int, ...]) -> WeightKind:
    if not shape and name.endswith(("_min", "_max")):
        return WeightKind.BOUND
    if name.endswith("bias"):
        return WeightKind.BIAS
    return WeightKind.MATRIX if len(shape) > 1 else WeightKind.SCALE
