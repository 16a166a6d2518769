"""Videos in containers, such as MP4 and WebM."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

from llmstack_media.containers import MATROSKA, MATROSKA_START, MP4, has_av, opened_container
from llmstack_media.decode.headers import check_size
from llmstack_media.decode.pictures import Pixels
from llmstack_media.errors import image_too_large, invalid_image, video_decoder_missing
from llmstack_media.limits import MediaLimits

_SHOWN_OF_VP8: Final = 0x10
"""Bit of a frame's first byte; other frames are only looked at by later ones."""


class Shots(NamedTuple):
    """The facts of a container about its first video.

    Attributes:
        num_frames: Counted, whatever a header says.
        seconds: How long they are shown, at the mean rate of frames.
    """

    num_frames: int
    seconds: float
    width: int
    height: int


def demuxer_of(data: bytes) -> str | None:
    """The demuxer of a video by its first bytes; None for what is none."""
    if data.startswith(MATROSKA_START):
        return MATROSKA
    return MP4 if data[4:8] == b"ftyp" else None


def read_shots(data: bytes, demuxer: str, limits: MediaLimits) -> Shots:
    """Counts the frames of a video by its packets; none is decoded.

    Raises:
        InvalidRequestError: It is damaged, has no video or no rate, is too large, or PyAV is not installed.
    """
    if not has_av():
        raise video_decoder_missing()
    with opened_container(io.BytesIO(data), demuxer, invalid_image) as found:
        stream = _video_of(found)
        width, height, rate = int(stream.width), int(stream.height), stream.average_rate
        if not rate or rate < 0:
            raise invalid_image("does not say how many frames it has in a second")
        check_size(width, height, limits)
        num_frames, most = 0, limits.max_video_pixels // (width * height)
        for packet in found.demux(stream):
            num_frames += _is_shown(packet, str(stream.codec_context.name))
            if num_frames > most:
                size = f"more than {most} frames of {width} × {height} pixels"
                raise image_too_large(f"has {size}; together at most {limits.max_video_pixels} pixels are allowed")
        if not num_frames:
            raise invalid_image("has no frames")
        return Shots(num_frames, num_frames / float(rate), width, height)


def decode_shots(data: bytes, demuxer: str, wanted: Sequence[int], limits: MediaLimits) -> Iterator[Pixels]:
    """The wanted frames, whose numbers ascend, in RGB.

    Raises:
        InvalidRequestError: One cannot be read, or has another size than the first.
    """
    if not has_av():
        raise video_decoder_missing()
    with opened_container(io.BytesIO(data), demuxer, invalid_image) as found:
        stream = _video_of(found)
        size = (int(stream.height), int(stream.width), 3)
        check_size(size[1], size[0], limits)
        frames, shown, pixels = found.decode(stream), -1, None
        for index in wanted:
            frame = None
            while shown < index:
                frame, shown = next(frames, None), shown + 1
                if frame is None:
                    raise invalid_image(f"ends before its frame {index}")
            if frame is not None:  # None where the same one is wanted again
                pixels = frame.to_ndarray(format="rgb24")
            if pixels is None or pixels.shape != size:
                raise invalid_image("has frames of different sizes")
            yield pixels


def _video_of(container: Any) -> Any:
    if not container.streams.video:
        raise invalid_image("has no video in it")
    stream = container.streams.video[0]
    stream.thread_type, stream.codec_context.thread_count = "NONE", 1  # one job has the time of one processor
    return stream


def _is_shown(packet: Any, codec: str) -> bool:
    if not packet.size or packet.is_discard:
        return False
    return codec != "vp8" or bool(memoryview(packet)[0] & _SHOWN_OF_VP8)
