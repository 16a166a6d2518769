"""Values of `multi_modal_data` as parts: files, pictures, samples."""

from __future__ import annotations

import base64
import io
import math
import os
import sys
from collections.abc import Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any, Final

from llmstack_llm import request_errors
from llmstack_llm.media.parts import MediaPart
from llmstack_types import InvalidRequestError
from llmstack_types.vocabulary import MediaKind

_FILE: Final = "data:application/octet-stream;base64,"
_FRAMES: Final = "data:video/jpeg;base64,"
_FRAME_AXES: Final = 4
DEFAULT_RATE: Final = 16_000
"""Samples per second of an array without a rate, in Hz."""


def read_multi_modal_data(param: str, data: object, max_items: Mapping[MediaKind, int]) -> list[MediaPart]:
    """The items of each kind in order; one that is no list is a list of one.

    `max_items`: The kinds that the model takes, and how many of each a prompt may have.

    Raises:
        InvalidRequestError: It has another kind or too many items, or one of them is nothing that can be read.
    """
    if not isinstance(data, Mapping):
        raise request_errors.invalid_type(param, "a dict such as {'image': ...}", data)
    parts: list[MediaPart] = []
    for kind, given in data.items():
        if kind not in max_items:
            name = f"{param}.{request_errors.echo(kind)}"
            raise request_errors.unsupported_parameter(name, f"this model takes {', '.join(['text', *max_items])} only")
        is_frames = kind == "video" and isinstance(given, list | tuple) and _is_video(given)
        is_one = is_frames or (kind == "audio" and _is_sound(given))
        is_list = isinstance(given, list | tuple) and not is_one
        items = [] if given is None else given if is_list else [given]
        if len(items) > max_items[kind]:
            message = f"A prompt has at most {max_items[kind]} items of the kind {kind}."
            raise InvalidRequestError(message, param=param, code="too_many_images")
        names = [f"{param}.{kind}[{index}]" if is_list else f"{param}.{kind}" for index in range(len(items))]
        parts += [_part(name, kind, item) for name, item in zip(names, items, strict=True)]
    return parts


def _part(param: str, kind: MediaKind, item: object) -> MediaPart:
    torch = sys.modules.get("torch")  # a tensor of PyTorch comes from who has imported it
    if kind == "image" and torch is not None and isinstance(item, torch.Tensor):
        return MediaPart(kind, "", param=param, vectors=item)
    return MediaPart(kind, _url(param, kind, item), param=param)


def _is_video(given: Sequence[object]) -> bool:
    """Whether a list is one video: of frames, each a picture of PIL or an array [height, width, 3]."""
    return bool(given) and all(_is_picture(one) or getattr(one, "ndim", 0) == _FRAME_AXES - 1 for one in given)


def _is_sound(given: object) -> bool:
    """Whether a value is one sound: samples, or (samples, rate)."""
    has_rate = isinstance(given, tuple) and len(given) == 2 and _is_number(given[1])
    return has_rate or (isinstance(given, list) and bool(given) and _is_number(given[0]))


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_picture(item: object) -> bool:
    return callable(getattr(item, "save", None))


def _url(param: str, kind: MediaKind, item: Any) -> str:
    """An item as a URL: of its file's bytes, of a file of the caller's, of a picture of PIL, or of frames."""
    if isinstance(item, str) and (item.startswith("data:") or "://" in item):
        return item
    if isinstance(item, str | os.PathLike):
        try:
            item = Path(item).read_bytes()
        except (OSError, ValueError) as error:
            raise request_errors.invalid_value(param, f"the file cannot be read: {error}") from error
    if isinstance(item, bytes):
        return _FILE + _base64(item)
    if kind == "audio":
        return _FILE + _base64(_wave_file(param, item))
    if kind == "video" and (getattr(item, "ndim", 0) == _FRAME_AXES or isinstance(item, list | tuple)):
        return _FRAMES + ",".join(_base64(_png(f"{param}[{index}]", frame)) for index, frame in enumerate(item))
    if kind == "video":
        raise request_errors.invalid_type(param, "bytes, a path, a URL, or frames [frames, height, width, 3]", item)
    return _FILE + _base64(_png(param, item))


def _wave_file(param: str, item: object) -> bytes:
    """Samples of one channel, or (samples, rate in Hz), as a file; without a rate they have `DEFAULT_RATE`."""
    from llmstack_media.sound.samples import as_floats  # late, as below
    from llmstack_media.sound.wave_files import as_wave_file

    samples, rate = item if isinstance(item, tuple) and _is_sound(item) else (item, DEFAULT_RATE)
    if not math.isfinite(rate) or int(rate) != rate:
        raise request_errors.invalid_value(param, "the rate must be a whole number of samples per second")
    if not hasattr(samples, "__array__") and not _is_sound(samples):
        raise request_errors.invalid_type(param, "bytes, a path, a URL, an array of samples or (array, rate)", item)
    try:
        return as_wave_file(as_floats(samples), int(rate))
    except InvalidRequestError as error:
        raise InvalidRequestError(error.message, param=param, code=error.code) from error


def _png(param: str, picture: Any) -> bytes:
    """A picture of PIL, or of a video's frames an array of bytes [height, width, 3], as a file."""
    try:
        if getattr(picture, "ndim", 0) == _FRAME_AXES - 1:
            from llmstack_media.decode.pixels import as_png  # late: a server for text alone needs none of it

            return as_png(picture)
        if not _is_picture(picture):
            raise request_errors.invalid_type(param, "bytes, a path, a URL or a picture of PIL", picture)
        file = io.BytesIO()
        picture.save(file, "PNG", compress_level=1)
    except InvalidRequestError:
        raise
    except (OSError, ValueError) as error:
        raise request_errors.invalid_value(param, f"the picture cannot be written as PNG: {error}") from error
    return file.getvalue()


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()
