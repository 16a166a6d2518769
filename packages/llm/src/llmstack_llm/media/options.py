"""Options of media in prompts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

MAX_VIDEO_FRAMES: Final = 768
"""Frames of a video that may be asked for, as `llmstack_media` has it, which options do not import."""


@dataclass(frozen=True, slots=True)
class MediaOptions:
    """How media of requests are fetched, counted and kept.

    Attributes:
        whole: The class of a checkpoint with parts beside its text, unless its text alone is asked for.
        max_items: Items of a kind in one prompt at most, where they are limited.
        cache_bytes: Of decoded items that are kept for later requests.
        source_bytes: Of items as they came, which requests hold until they are decoded. One request has an eighth.
        max_audio_s: Seconds of a sound file at most.
        takes_vectors: Whether a request may give vectors in place of a picture.
        max_image_pixels: Width × height of a picture at most.
        allowed_domains: Hosts whose URLs are fetched; `*` is every public one.
        allowed_networks: Networks of private addresses that may be dialled.
        local_path: Folder of which `file:` URLs are read; empty for none.
        has_redirects: Whether redirects are followed.
        processor_options: Of the model's processor, for every request.
        video: How many frames of a video are taken: `num_frames` and `fps` of `llmstack_media.VideoProcessor`.
        background: Colour (red, green, blue) under transparent parts; None for white.
    """

    whole: str = ""
    max_items: Mapping[str, int] = field(default_factory=dict)
    cache_bytes: int = 4 << 30
    source_bytes: int = 1 << 30
    max_audio_s: float = 7200.0
    takes_vectors: bool = False
    max_image_pixels: int = 50_000_000
    allowed_domains: tuple[str, ...] = ()
    allowed_networks: tuple[str, ...] = ()
    local_path: str = ""
    has_redirects: bool = True
    processor_options: Mapping[str, object] = field(default_factory=dict)
    video: Mapping[str, object] = field(default_factory=dict)
    background: tuple[int, int, int] | None = None
