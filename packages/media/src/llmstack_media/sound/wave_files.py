"""WAV files, read in blocks of a second, whatever their headers say of lengths."""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import BinaryIO, Final

import numpy as np
from numpy.typing import NDArray

from llmstack_media.errors import invalid_audio

Block = NDArray[np.float32]
"""[num_samples, num_channels], from -1 to 1."""
MAX_CHANNELS: Final = 64
MIN_RATE, MAX_RATE = 1000, 384_000
_PCM, _FLOAT, _A_LAW, _MU_LAW, _EXTENSIBLE = 1, 3, 6, 7, 0xFFFE
_WIDTHS = {_PCM: (8, 16, 24, 32), _FLOAT: (32, 64), _A_LAW: (8,), _MU_LAW: (8,)}
_NO_LENGTHS = (0, 0xFFFFFFFF)
_MAX_CHUNKS = 256
"""Chunks before the sound: their sizes are the client's word."""


@dataclass(frozen=True, slots=True)
class WaveFormat:
    """The form of the samples of a file.

    Attributes:
        code: 1 for integers, 3 for floating point, 6 for A-law, 7 for µ-law; others are compressed.
        rate: Samples per second of each channel, in Hz.
        width: Bits of a sample.
        num_bytes: Of all samples, as the header says; None where that is no length.
    """

    code: int
    num_channels: int
    rate: int
    width: int
    num_bytes: int | None = None

    @property
    def is_plain(self) -> bool:
        """Whether this module decodes it."""
        return self.width in _WIDTHS.get(self.code, ())

    @property
    def frame_bytes(self) -> int:
        """Bytes of one sample of all channels."""
        return self.num_channels * self.width // 8


def read_wave_format(file: BinaryIO) -> WaveFormat:
    """The format of a file, which is then at its first sample.

    Chunks may come in any order, and the one of samples may say any length: programs that write to a pipe set it to 0
    or to the largest number.

    Raises:
        InvalidRequestError: The header is damaged, or there is no sound.
    """
    file.seek(12)
    found: WaveFormat | None = None
    for _ in range(_MAX_CHUNKS):
        head = file.read(8)
        if len(head) < 8:
            break
        name, size = struct.unpack("<4sI", head)
        if name == b"data":
            if found is None:
                raise invalid_audio("has samples before their format")
            return replace(found, num_bytes=None if size in _NO_LENGTHS else size)
        start = file.tell()
        if name == b"fmt ":
            found = _parsed(file.read(min(size, 64)))
        file.seek(start + size + size % 2)
    raise invalid_audio("has no samples")


def _parsed(chunk: bytes) -> WaveFormat:
    if len(chunk) < 16:
        raise invalid_audio("has a damaged header")
    code, num_channels, rate, _, _, width = struct.unpack_from("<HHIIHH", chunk)
    if code == _EXTENSIBLE and len(chunk) >= 26:
        code = struct.unpack_from("<H", chunk, 24)[0]
    check_shape(num_channels, rate)
    return WaveFormat(code, num_channels, rate, width)


def check_shape(num_channels: int, rate: int) -> None:
    """Raises InvalidRequestError for a number of channels or a rate that no sound has."""
    if not 0 < num_channels <= MAX_CHANNELS:
        raise invalid_audio(f"has {num_channels} channels; 1 to {MAX_CHANNELS} are allowed")
    if not MIN_RATE <= rate <= MAX_RATE:
        raise invalid_audio(f"has {rate} samples per second; {MIN_RATE} to {MAX_RATE} are allowed")


def wave_blocks(file: BinaryIO, wave: WaveFormat) -> Iterator[Block]:
    """The samples that follow in the file, as far as it has them, a second at a time; a part of one is dropped."""
    rest = sys.maxsize if wave.num_bytes is None else wave.num_bytes
    while data := file.read(min(rest, wave.frame_bytes * wave.rate)):
        rest -= len(data)
        whole = len(data) - len(data) % wave.frame_bytes
        if whole:
            yield _decoded(data[:whole], wave).reshape(-1, wave.num_channels)


def as_wave_file(samples: NDArray[np.float32], rate: int) -> bytes:
    """A file with these samples [num_samples], as they are. `rate`: In Hz.

    Raises:
        InvalidRequestError: No sound has this rate.
    """
    check_shape(1, rate)
    data = samples.astype("<f4").tobytes()
    form = struct.pack("<HHIIHH", _FLOAT, 1, rate, 4 * rate, 4, 32)
    chunks = b"".join(
        struct.pack("<4sI", name, len(chunk)) + chunk for name, chunk in ((b"fmt ", form), (b"data", data))
    )
    return struct.pack("<4sI4s", b"RIFF", 4 + len(chunks), b"WAVE") + chunks


def _decoded(data: bytes, wave: WaveFormat) -> NDArray[np.float32]:
    if wave.code == _FLOAT:
        floats = np.frombuffer(data, f"<f{wave.width // 8}")
        finite: NDArray[np.float32] = np.clip(np.nan_to_num(floats), -1.0, 1.0).astype(np.float32)
        return finite
    if wave.code == _PCM:
        return _integers(data, wave.width)
    table = _MU_LAW_VALUES if wave.code == _MU_LAW else _A_LAW_VALUES
    values: NDArray[np.float32] = table[np.frombuffer(data, np.uint8)]
    return values


def _integers(data: bytes, width: int) -> NDArray[np.float32]:
    if width == 8:
        return (np.frombuffer(data, np.uint8).astype(np.float32) - np.float32(128)) / np.float32(128)
    if width == 24:  # the upper three bytes of 32 bits
        padded = np.zeros((len(data) // 3, 4), np.uint8)
        padded[:, 1:] = np.frombuffer(data, np.uint8).reshape(-1, 3)
        return padded.view("<i4")[:, 0].astype(np.float32) / np.float32(1 << 31)
    return np.frombuffer(data, f"<i{width // 8}").astype(np.float32) / np.float32(1 << (width - 1))


def _mu_law() -> NDArray[np.float32]:
    """G.711: a sign, three bits of exponent and four of mantissa, all inverted."""
    code = ~np.arange(256, dtype=np.int32) & 0xFF
    size = ((((code & 0x0F) << 3) + 0x84) << ((code >> 4) & 7)) - 0x84
    return (np.where(code & 0x80, -size, size) / 32768).astype(np.float32)


def _a_law() -> NDArray[np.float32]:
    """G.711: the same with every other bit inverted, and a step less at the lowest exponent."""
    code = np.arange(256, dtype=np.int32) ^ 0x55
    exponent, mantissa = (code >> 4) & 7, (code & 0x0F) << 4
    size = np.where(exponent == 0, mantissa + 8, (mantissa + 0x108) << np.maximum(exponent - 1, 0))
    return (np.where(code & 0x80, size, -size) / 32768).astype(np.float32)


_MU_LAW_VALUES: Final = _mu_law()
_A_LAW_VALUES: Final = _a_law()
