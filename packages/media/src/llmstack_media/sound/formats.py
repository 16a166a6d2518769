"""The format of a sound file by its first bytes.

Names and declared types do not matter.
"""

from __future__ import annotations

from typing import Final

from llmstack_media.containers import MATROSKA, MATROSKA_START, MP4
from llmstack_media.errors import unsupported_sound_format

HEAD_BYTES: Final = 16
"""So many bytes of a file tell its format."""
WAV: Final = "wav"
_MP3 = "mp3"
_ADTS_MASK, _ADTS = 0xFFF6, 0xFFF0
_LAYERS = 0x06
_STARTS = (
    (b"fLaC", "flac"), (b"OggS", "ogg"), (MATROSKA_START, MATROSKA), (b"ID3", _MP3),
    (b"\0\0\x01\xba", "mpeg"),
)  # fmt: skip


def sound_format(head: bytes) -> str:
    """The demuxer of a file, as FFmpeg names it; `WAV` is read here.

    Args:
        head: The first `HEAD_BYTES` of the file.

    Raises:
        InvalidRequestError: They begin like no allowed format; the code is `unsupported_media_format`.
    """
    if head[:4] in (b"RIFF", b"RF64") and head[8:12] == b"WAVE":
        return WAV
    for start, name in _STARTS:
        if head.startswith(start):
            return name
    if head[4:8] == b"ftyp":
        return MP4
    sync = int.from_bytes(head[:2], "big")
    if len(head) > 1 and sync & _ADTS_MASK == _ADTS:
        return "aac"
    if len(head) > 1 and sync & 0xFFE0 == 0xFFE0 and sync & _LAYERS:
        return _MP3
    raise unsupported_sound_format()
