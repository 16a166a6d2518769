"""Videos as frames: animations, containers such as MP4, lists of pictures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from PIL import Image

from llmstack_media.decode.containers import decode_shots, demuxer_of, read_shots
from llmstack_media.decode.headers import ImageHeader, checked_header, opened, read_header
from llmstack_media.decode.pictures import Pixels, decode_image, pixels_of
from llmstack_media.decode.pixels import WHITE, Color
from llmstack_media.decode.signatures import format_of
from llmstack_media.errors import image_too_large, invalid_image, unsupported_video
from llmstack_media.limits import MediaLimits
from llmstack_types import InvalidRequestError

_LIST_START: Final = b"llmstack-frames\0"
_LENGTH_BYTES: Final = 4
_DEFAULT_MS: Final = 100
"""Of a frame that says no time, as browsers show it."""
_GIF_EXTENSION, _GIF_IMAGE, _GIF_END, _GIF_CONTROL = 0x21, 0x2C, 0x3B, 0xF9


class Clip(NamedTuple):
    """A video before it is decoded.

    Attributes:
        num_frames: All that it has.
        seconds: How long they are shown; 0 for a list, which does not say it.
        width: Of each frame, in pixels as it is shown.
        height: Of the same.
    """

    num_frames: int
    seconds: float
    width: int
    height: int

    @property
    def is_list(self) -> bool:
        """Whether it is a list of pictures."""
        return not self.seconds

    def num_decoded(self, wanted: Sequence[int]) -> int:
        """Frames that have to be decoded for the wanted ones: of an animation, all before them too."""
        return len(wanted) if self.is_list else wanted[-1] + 1


def join_frames(frames: Sequence[bytes]) -> bytes:
    """The files of a list of pictures as one, which `read_clip` takes."""
    return _LIST_START + b"".join(len(frame).to_bytes(_LENGTH_BYTES, "big") + frame for frame in frames)


def read_clip(data: bytes, limits: MediaLimits) -> Clip:
    """The size and frames of a video by its headers; no pixel is decoded.

    Raises:
        InvalidRequestError: It is neither an animated picture nor a list of pictures, is damaged, or exceeds a limit.
    """
    clip = _clip_of_list(data, limits) if data.startswith(_LIST_START) else _clip_of_animation(data, limits)
    num_pixels = clip.num_frames * clip.width * clip.height
    if num_pixels > limits.max_video_pixels:
        size = f"{clip.num_frames} frames of {clip.width} × {clip.height} pixels"
        raise image_too_large(f"has {size}; together at most {limits.max_video_pixels} pixels are allowed")
    return clip


def decode_frames(
    data: bytes, wanted: Sequence[int], limits: MediaLimits, background: Color = WHITE
) -> Iterator[Pixels]:
    """The wanted frames, whose numbers ascend, as they are shown: in RGB, transparent parts on `background`.

    Raises:
        InvalidRequestError: A frame cannot be read, or has another size than the header says.
    """
    if data.startswith(_LIST_START):
        frames = _split(data, limits)
        yield from (decode_image(frames[index], limits, background) for index in wanted)
        return
    if demuxer := _container_of(data):
        yield from decode_shots(data, demuxer, wanted, limits)
        return
    with opened(data) as image:
        header = checked_header(image, data, limits)
        yield from _frames_of_animation(image, header, wanted, background)


def _container_of(data: bytes) -> str | None:
    """The demuxer of what is no picture; an AVIF begins as an MP4 does."""
    try:
        format_of(data)
    except InvalidRequestError:
        return demuxer_of(data)
    return None


def _frames_of_animation(
    image: Image.Image, header: ImageHeader, wanted: Sequence[int], background: Color
) -> Iterator[Pixels]:
    shown = -1
    for index in wanted:
        for number in range(shown + 1, index + 1):
            image.seek(number)
            image.load()  # a GIF's frame is drawn over the one before
        shown = max(shown, index)
        yield pixels_of(image, header, background)


def _clip_of_list(data: bytes, limits: MediaLimits) -> Clip:
    frames = _split(data, limits)
    sizes = {(header.width, header.height) for header in (read_header(frame, limits) for frame in frames)}
    if len(sizes) != 1:
        raise invalid_image("has frames of different sizes" if sizes else "has no frames")
    ((width, height),) = sizes
    return Clip(len(frames), 0.0, width, height)


def _split(data: bytes, limits: MediaLimits) -> list[bytes]:
    frames, at = [], len(_LIST_START)
    while at < len(data):
        start = at + _LENGTH_BYTES
        at = start + int.from_bytes(data[at:start], "big")
        frames.append(data[start:at])
        if len(frames) > limits.max_video_frames:
            raise too_many_frames(limits.max_video_frames)
    return frames


def too_many_frames(max_frames: int) -> Exception:
    """The refusal of a list with more frames than allowed."""
    return image_too_large(f"has more than the {max_frames} frames that are allowed")


def _clip_of_animation(data: bytes, limits: MediaLimits) -> Clip:
    if demuxer := _container_of(data):
        return Clip(*read_shots(data, demuxer, limits))
    try:
        name = format_of(data)
    except InvalidRequestError as error:
        raise unsupported_video() from error
    if name not in (*_DURATIONS, "AVIF"):
        raise invalid_image(f"is no video: {name} has one picture")
    with opened(data) as image:
        header = checked_header(image, data, limits)
        num_frames = int(getattr(image, "n_frames", 1))
    found = _DURATIONS[name](data) if name in _DURATIONS else [_avif_ms(data) / num_frames] * num_frames
    durations = [*found[:num_frames], *[0.0] * (num_frames - len(found))]
    total_ms = sum(one or _DEFAULT_MS for one in durations)
    return Clip(num_frames, total_ms / 1000, header.width, header.height)


def _gif_durations(data: bytes) -> list[float]:
    """Milliseconds of each frame of a GIF, from its blocks."""
    durations: list[float] = []
    delay, at = 0, 13 + _palette_bytes(data[10:11])
    while at < len(data) and data[at] != _GIF_END:
        if data[at] == _GIF_EXTENSION:
            if data[at + 1 : at + 2] == bytes([_GIF_CONTROL]):
                delay = int.from_bytes(data[at + 4 : at + 6], "little") * 10
            at = _behind_blocks(data, at + 2)
        elif data[at] == _GIF_IMAGE:
            durations.append(delay)
            at = _behind_blocks(data, at + 11 + _palette_bytes(data[at + 9 : at + 10]))
        else:
            at += 1  # as Pillow skips what is no block
    return durations


def _palette_bytes(flags: bytes) -> int:
    return 3 << (flags[0] & 7) + 1 if flags and flags[0] & 0x80 else 0


def _behind_blocks(data: bytes, at: int) -> int:
    while at < len(data) and data[at]:
        at += 1 + data[at]
    return at + 1


def _webp_durations(data: bytes) -> list[float]:
    """The durations of the frames of an animated WebP, from its chunks."""
    durations: list[float] = []
    at = 12
    while at + 8 <= len(data):
        if data[at : at + 4] == b"ANMF":
            durations.append(int.from_bytes(data[at + 20 : at + 23], "little"))
        length = int.from_bytes(data[at + 4 : at + 8], "little")
        at += 8 + length + length % 2
    return durations


def _png_durations(data: bytes) -> list[float]:
    """The durations of the frames of an animated PNG, from its chunks."""
    durations: list[float] = []
    at = 8
    while at + 8 <= len(data):
        if data[at + 4 : at + 8] == b"fcTL":
            count, unit = (int.from_bytes(data[at + start : at + start + 2], "big") for start in (28, 30))
            durations.append(1000 * count / (unit or 100))
        at += 12 + int.from_bytes(data[at : at + 4], "big")
    return durations


def _avif_ms(data: bytes) -> float:
    """Milliseconds of all frames of an AVIF, from the box of its track; 0 if there is none."""
    at = data.find(b"mdhd") + 4
    if at < 4:
        return 0.0
    start, length = (20, 8) if data[at : at + 1] == b"\1" else (12, 4)
    scale = int.from_bytes(data[at + start : at + start + 4], "big")
    duration = int.from_bytes(data[at + start + 4 : at + start + 4 + length], "big")
    return 1000 * duration / scale if scale else 0.0


_DURATIONS: Final[Mapping[str, Callable[[bytes], list[float]]]] = {
    "GIF": _gif_durations, "WEBP": _webp_durations, "PNG": _png_durations,
}  # fmt: skip
