"""Pictures as arrays of RGB: the first frame, or some frames of an animation."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from llmstack_media.decode.headers import ANIMATED_FORMATS, ImageHeader, checked_header, opened
from llmstack_media.decode.pixels import WHITE, Color, as_shown, to_rgb
from llmstack_media.errors import image_too_large, invalid_image
from llmstack_media.limits import MediaLimits

Pixels = NDArray[np.uint8]
"""[height, width, 3]"""
_DEFAULT_FRAME_MS = 100


@dataclass(frozen=True, slots=True)
class Animation:
    """Frames that were taken of an animation, in order.

    Attributes:
        frames: Pixels of each.
        seconds: When each of them begins to be shown.
        num_frames: Frames that the animation has.
    """

    frames: list[Pixels]
    seconds: list[float]
    num_frames: int


def decode_image(data: bytes, limits: MediaLimits, background: Color = WHITE) -> Pixels:
    """The first frame of a picture as it is shown: turned, in RGB, transparent parts on `background`.

    Raises:
        InvalidRequestError: It cannot be read, or exceeds a limit, which the header says before a pixel is decoded.
    """
    with opened(data) as image:
        return _frame(image, checked_header(image, data, limits), background)


def decode_animation(
    data: bytes, limits: MediaLimits, max_frames: int | None = None, background: Color = WHITE
) -> Animation:
    """At most `max_frames` frames, evenly spread from the first to the last.

    Raises:
        InvalidRequestError: As `decode_image`; or its frames are too many pixels together.
    """
    with opened(data) as image:
        header = checked_header(image, data, limits)
        if header.format not in ANIMATED_FORMATS:
            raise invalid_image(f"is no video: {header.format} has one picture")
        num_frames = int(getattr(image, "n_frames", 1))
        if num_frames * header.width * header.height > limits.max_video_pixels:
            size = f"{num_frames} frames of {header.width} × {header.height} pixels"
            raise image_too_large(f"has {size}; together at most {limits.max_video_pixels} pixels are allowed")
        wanted = chosen_frames(num_frames, min(limits.max_video_frames, max_frames or limits.max_video_frames))
        return _decoded_frames(image, header, background, wanted, num_frames)


def chosen_frames(num_frames: int, max_frames: int) -> list[int]:
    """Indices of frames, evenly spread, with the first and the last one."""
    if num_frames <= max_frames:
        return list(range(num_frames))
    if max_frames == 1:
        return [0]
    return [round(index * (num_frames - 1) / (max_frames - 1)) for index in range(max_frames)]


def _decoded_frames(
    image: Image.Image, header: ImageHeader, background: Color, wanted: list[int], num_frames: int
) -> Animation:
    frames, seconds, passed_ms = [], [], 0.0
    remaining = set(wanted)
    for index in range(wanted[-1] + 1):
        image.seek(index)
        image.load()  # a GIF's frame is drawn over the one before
        if index in remaining:
            frames.append(_frame(image, header, background))
            seconds.append(passed_ms / 1000)
        passed_ms += float(image.info.get("duration") or _DEFAULT_FRAME_MS)
    return Animation(frames, seconds, num_frames)


def _frame(image: Image.Image, header: ImageHeader, background: Color) -> Pixels:
    image.load()
    pixels = np.asarray(as_shown(to_rgb(image, background), header.orientation))
    if pixels.shape != (header.height, header.width, 3):  # a file whose parts disagree
        raise invalid_image("cannot be read: its size is not what its header says")
    return pixels
