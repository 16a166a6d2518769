"""Videos in containers for tests, written by PyAV where it is installed."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest


def smooth(count: int, width: int = 80, height: int = 56) -> list[Any]:
    """Frames [height, width, 3] of colours that change with place and time."""
    rows, columns = np.mgrid[0:height, 0:width]
    return [
        np.stack([rows * 4 + 9 * number, columns * 3 + 5 * number, rows + columns + 20 * number], axis=2).astype(
            np.uint8
        )
        for number in range(count)
    ]


def film(frames: Sequence[Any], kind: str = "mp4", codec: str = "mpeg4", rate: int = 4) -> bytes:
    """A file of the frames, so many in a second; skips without PyAV."""
    av: Any = pytest.importorskip("av", reason="PyAV is not installed")
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=kind) as container:
        stream = container.add_stream(codec, rate=rate)
        stream.height, stream.width = frames[0].shape[:2]
        stream.pix_fmt = "yuv420p"
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode(None))
    return buffer.getvalue()


def read_by_transformers(data: bytes, wanted: Sequence[int] | None = None) -> tuple[Any, float]:
    """Frames [n, height, width, 3] as transformers' reader has them, and the seconds of a video with a count."""
    from transformers.video_utils import read_video_pyav

    def chosen(metadata: Any, **options: Any) -> list[int]:
        return list(range(metadata.total_num_frames or 10_000)) if wanted is None else list(wanted)

    file: Any = io.BytesIO(data)
    frames, metadata = read_video_pyav(file, chosen)
    return frames, float(metadata.duration)
