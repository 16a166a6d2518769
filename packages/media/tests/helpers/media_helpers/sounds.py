"""Sound files for tests: WAV written by hand, so that headers can be odd."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
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
