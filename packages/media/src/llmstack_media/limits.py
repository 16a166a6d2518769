"""Limits of what a picture, video or sound may cost, checked before it is paid."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

MAX_VIDEO_FRAMES: Final = 768
DECODED_PER_S: Final = 40
"""Seconds of sound that a second of a processor decodes at least; most files have several hundred."""
MIN_SOUND_S: Final = 0.1
"""Seconds of a sound at least, as OpenAI has it."""


@dataclass(frozen=True, slots=True)
class MediaLimits:
    """Limits of one picture or video, and of all that are decoded at once.

    Attributes:
        max_bytes: Of a picture or video as it came, before it is decoded.
        max_image_pixels: Width × height, as the header says.
        max_aspect_ratio: The longer side divided by the shorter one.
        max_video_frames: Frames that are taken of a video.
        max_video_pixels: Width × height × frames that have to be decoded to take these.
        max_audio_s: Seconds of a sound, counted while it is decoded.
        max_pixels_at_once: Of all pictures that are being decoded, and samples of sounds, of every key.
        max_key_pixels_at_once: The same of one key.
        max_request_bytes: Of all pictures of one request, as they came.
        max_source_bytes: Of pictures that requests hold as they came until they are decoded, of every key.
        decode_s: Processor time for one picture.
        video_decode_s: Processor time for one video.
        sounds_per_s: Seconds of sound for which there is a second of processor time, besides `decode_s`.
    """

    max_bytes: int = 25 << 20
    max_image_pixels: int = 50_000_000
    max_aspect_ratio: int = 200
    max_video_frames: int = MAX_VIDEO_FRAMES
    max_video_pixels: int = 800_000_000
    max_audio_s: float = 7200.0
    max_pixels_at_once: int = 200_000_000
    max_key_pixels_at_once: int = 100_000_000
    max_request_bytes: int = 128 << 20
    max_source_bytes: int = 1 << 30
    decode_s: float = 10.0
    video_decode_s: float = 30.0
    sounds_per_s: float = DECODED_PER_S
