"""Values out of a checkpoint's files, each checked for its type and range."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from llmstack_media.errors import ProcessorConfigError

MAX_SIDE = 16_384
"""Largest side, in pixels, that a configuration may ask for."""
MAX_COUNT = 1 << 20
_NOTHING: Mapping[str, Any] = {}


@dataclass(frozen=True, slots=True)
class CheckpointFiles:
    """Contents of the files that describe preprocessing; a missing file is an empty mapping.

    Attributes:
        preprocessor: `preprocessor_config.json`.
        processor: `processor_config.json`; transformers 5 writes the image processor into it.
        tokenizer: `tokenizer_config.json`, for the names of special tokens.
        model: `config.json`, for the patch size of the encoder.
        video_preprocessor: `video_preprocessor_config.json`.
    """

    preprocessor: Mapping[str, Any] = field(default_factory=dict)
    processor: Mapping[str, Any] = field(default_factory=dict)
    tokenizer: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    video_preprocessor: Mapping[str, Any] = field(default_factory=dict)

    @property
    def image(self) -> Mapping[str, Any]:
        """The options of the image processor. As in the reference, those in `processor_config.json` come first."""
        nested = self.processor.get("image_processor")
        return nested if isinstance(nested, dict) else self.preprocessor

    @property
    def video(self) -> Mapping[str, Any]:
        """The options of the video processor. Without any of its own it has those of pictures, as in the reference."""
        nested = self.processor.get("video_processor")
        return nested if isinstance(nested, dict) else self.video_preprocessor or self.preprocessor

    @property
    def vision(self) -> Mapping[str, Any]:
        """The configuration of the encoder."""
        vision = self.model.get("vision_config")
        return vision if isinstance(vision, dict) else _NOTHING

    def token(self, name: str, default: str) -> str:
        """The special token of this role, such as `image_token`."""
        extra = self.tokenizer.get("extra_special_tokens")
        for source in (extra if isinstance(extra, dict) else _NOTHING, self.tokenizer, self.processor):
            value = source.get(name)
            value = value.get("content") if isinstance(value, dict) else value
            if isinstance(value, str) and value:
                return value
        return default

    def encoder_patch_size(self) -> int:
        """Side of a patch of the encoder, in pixels.

        Raises:
            ProcessorConfigError: The model's configuration does not say it.
        """
        value = self.vision.get("patch_size")
        if isinstance(value, list) and len(set(map(str, value))) == 1:
            value = value[0]  # InternVL's has two equal ones
        if value is None:
            raise ProcessorConfigError("config.json has no vision_config.patch_size")
        return checked_integer("vision_config.patch_size", value, 1, MAX_SIDE)


def checked_integer(name: str, value: object, low: int, high: int) -> int:
    """An integer in a range.

    Raises:
        ProcessorConfigError: It is none, or outside of the range.
    """
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ProcessorConfigError(f"{name} must be an integer between {low} and {high}")
    return value


def integer(values: Mapping[str, Any], name: str, default: int, low: int = 1, high: int = MAX_COUNT) -> int:
    """The integer of a key; the default where it is absent or null."""
    value = values.get(name)
    return default if value is None else checked_integer(name, value, low, high)


def boolean(values: Mapping[str, Any], name: str, default: bool) -> bool:
    """The boolean of a key; the default where it is absent or null.

    Raises:
        ProcessorConfigError: It is something else.
    """
    value = values.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ProcessorConfigError(f"{name} must be true or false")
    return value


def number(values: Mapping[str, Any], name: str, default: float) -> float:
    """The positive number of a key; the default where it is absent or null.

    Raises:
        ProcessorConfigError: It is something else.
    """
    value = values.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
        raise ProcessorConfigError(f"{name} must be a positive number")
    return float(value)


def channels(values: Mapping[str, Any], name: str, default: tuple[float, ...]) -> tuple[float, ...]:
    """Three numbers, one for each of red, green and blue; one number stands for all.

    Raises:
        ProcessorConfigError: They are something else.
    """
    value = values.get(name)
    if value is None:
        return default
    items = value if isinstance(value, (list, tuple)) else [value] * 3
    are_numbers = all(isinstance(item, (int, float)) and math.isfinite(item) for item in items)
    if len(items) != 3 or not are_numbers:
        raise ProcessorConfigError(f"{name} must be three numbers")
    return tuple(float(item) for item in items)


def refuse(values: Mapping[str, Any], inert: Mapping[str, tuple[object, ...]]) -> None:
    """Refuses keys that change pixels in the reference and are not implemented. `inert`: Values that change nothing.

    Raises:
        ProcessorConfigError: A key has another value.
    """
    for name, allowed in inert.items():
        if values.get(name) is not None and values[name] not in allowed:
            raise ProcessorConfigError(f"{name} = {str(values[name])[:64]} is not supported by this image processor")


def size_of(value: object, name: str, default: Mapping[str, int], *, is_square: bool) -> dict[str, int]:
    """A size by its keys, such as `height` and `width`. `is_square`: Whether one integer is both, or the shortest edge.

    Raises:
        ProcessorConfigError: It is no size.
    """
    if value is None:
        return dict(default)
    if isinstance(value, int) and not isinstance(value, bool):
        value = {"height": value, "width": value} if is_square else {"shortest_edge": value}
    if isinstance(value, list) and len(value) == 2:
        value = {"height": value[0], "width": value[1]}
    if not isinstance(value, dict):
        raise ProcessorConfigError(f"{name} must be a size, such as {{'height': 384, 'width': 384}}")
    named = {key: item for key, item in value.items() if item is not None}
    return {key: checked_integer(f"{name}.{key}", item, 1, MAX_SIDE * MAX_SIDE) for key, item in named.items()}
