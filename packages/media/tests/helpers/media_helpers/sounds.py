"""Sound files for tests: WAV written by hand, so that headers can be odd; others by PyAV, where it is."""

from __future__ import annotations

import io
import struct
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

Samples = NDArray[np.float32]


def tone(seconds: float = 0.5, rate: int = 16_000, hertz: float = 440.0) -> Samples:
    """A tone of amplitude a half [n]."""
    return (0.5 * np.sin(2 * np.pi * hertz * np.arange(int(seconds * rate)) / rate)).astype(np.float32)


def wav(
    data: bytes, code: int = 1, channels: int = 1, rate: int = 16_000, width: int = 16, *,
    size: int | None = None, before: bytes = b"", behind: bytes = b"", extra: bytes = b"",
) -> bytes:  # fmt: skip
    """A file with these bytes of samples; `size` is what the header says of them."""
    frame = channels * width // 8
    form = struct.pack("<HHIIHH", code, channels, rate, rate * frame, frame, width) + extra
    head = before + b"fmt " + struct.pack("<I", len(form)) + form
    body = b"WAVE" + head + b"data" + struct.pack("<I", len(data) if size is None else size) + data + behind
    return b"RIFF" + struct.pack("<I", len(body)) + body


def pcm16(samples: NDArray[Any]) -> bytes:
    """Samples of any shape as 16-bit integers."""
    return (np.clip(samples, -1, 1) * 32767).astype("<i2").tobytes()


def chunk(name: bytes, data: bytes) -> bytes:
    """A chunk of a RIFF file."""
    return name + struct.pack("<I", len(data)) + data + b"\0" * (len(data) % 2)


def encoded(kind: str, samples: Samples, codec: str, rate: int = 48_000, *, with_video: bool = False) -> bytes:
    """A compressed file of the samples, by PyAV; skips without it. No `codec`: it has no sound."""
    av: Any = pytest.importorskip("av", reason="PyAV is not installed")
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=kind) as container:
        video = container.add_stream("mpeg4", rate=10) if with_video else None
        stream = container.add_stream(codec, rate=rate, layout="mono") if codec else None
        if video is not None:
            video.width, video.height, video.pix_fmt = 64, 48, "yuv420p"
            picture = av.VideoFrame.from_ndarray(np.zeros((48, 64, 3), np.uint8), format="rgb24")
            container.mux([*video.encode(picture), *video.encode(None)])
        if stream is None:
            container.close()
            return buffer.getvalue()
        frame = av.AudioFrame.from_ndarray(samples[None], format="fltp", layout="mono")
        frame.sample_rate = rate
        resampler = av.AudioResampler(format=stream.format, layout="mono", rate=rate, frame_size=stream.frame_size)
        for piece in [*resampler.resample(frame), *resampler.resample(None)]:
            container.mux(stream.encode(piece))
        container.mux(stream.encode(None))
    return buffer.getvalue()
