"""Options of pictures and videos in prompts, and of sound files."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from llmstack_llm.media.options import MAX_VIDEO_FRAMES, MediaOptions
from llmstack_llm.options.option import OptionGroup
from llmstack_llm.options.problem import Problem
from llmstack_types.engine_settings import MediaSettings
from llmstack_types.options import option, option_group

_IO_KEYS = {"image": ("rgba_background_color",), "video": ("num_frames", "fps")}

_ALL = -1
_MAX_FPS = 1000


def check_network(networks: tuple[str, ...]) -> tuple[str, ...]:
    """Networks in CIDR form."""
    import ipaddress  # late: most lines name none

    for text in networks:
        ipaddress.ip_network(text)
    return networks


@option_group
class MediaInputOptions(MediaSettings, OptionGroup):
    """Where pictures, videos and sound come from, how they are prepared, and how many are kept."""

    title = "Pictures"

    mm_processor_kwargs: Mapping[str, Any] | None = option(
        None,
        help="options of the model's image processor for all requests; they may make a picture cheaper, not larger",
        example='{"max_pixels": 602112}',
    )
    media_io_kwargs: Mapping[str, Any] | None = option(
        None,
        help="how files are decoded: the colour under transparent parts of a picture (default: white), and how many "
        "frames of a video are taken, in all and of a second; -1 is as many as are allowed",
        example='{"video": {"num_frames": 16}}',
    )
    mm_processor_cache_gb: float = option(
        4.0, at_least=0, at_most=4096, metavar="GIB", help="memory of decoded pictures that are kept for later requests"
    )
    max_image_pixels: int = option(
        50_000_000,
        at_least=1,
        suffixes=True,
        help="maximum width times height of a picture, from its header; larger ones are refused undecoded",
    )
    max_audio_seconds: float = option(
        7200.0,
        at_least=0.1,
        at_most=86400,
        metavar="S",
        help="maximum seconds of a sound file, counted while it is decoded; longer ones are refused",
    )
    allowed_media_domains: tuple[str, ...] = option(
        (),
        metavar="HOST",
        help="hosts whose http and https URLs are fetched: by name, all below with *.name, or * for every public host "
        "(default: none; data: URLs always are)",
    )
    allowed_media_networks: tuple[str, ...] = option(
        (),
        check=check_network,
        metavar="CIDR",
        help="networks of private addresses that may be dialled for these hosts (default: public addresses alone)",
    )
    allowed_local_media_path: str = option(
        "", metavar="FOLDER", help="folder of which file: URLs may be read (default: none)"
    )
    media_redirects: bool = option(
        True, help="follow redirects of media URLs, at most three, each checked as the first"
    )

    def media_input_options(self, max_items: Mapping[str, int], whole: str) -> MediaOptions:
        """The options for the front end; `max_items`: by `--limit-mm-per-prompt`, `whole`: as in `MediaOptions`."""
        given = self.media_io_kwargs or {}
        colour = given.get("image", {}).get("rgba_background_color")
        video = dict(given.get("video", {}))
        if video.get("num_frames") == _ALL:
            video["num_frames"] = MAX_VIDEO_FRAMES
        if video.get("fps") == _ALL:
            del video["fps"]
        return MediaOptions(
            whole=whole,
            max_items=max_items,
            cache_bytes=int(self.mm_processor_cache_gb * (1 << 30)),
            max_audio_s=self.max_audio_seconds,
            takes_vectors=self.enable_mm_embeds,
            max_image_pixels=self.max_image_pixels,
            allowed_domains=self.allowed_media_domains,
            allowed_networks=self.allowed_media_networks,
            local_path=self.allowed_local_media_path,
            has_redirects=self.media_redirects,
            processor_options=self.mm_processor_kwargs or {},
            video=video,
            background=None if colour is None else tuple(colour),
        )

    def conflicts(self) -> Iterator[Problem]:
        """Adds a folder that is not there, and keys that name nothing."""
        yield from super().conflicts()
        if self.allowed_local_media_path and not os.path.isdir(self.allowed_local_media_path):
            yield Problem("{allowed_local_media_path} is no folder")
        for kind, values in (self.media_io_kwargs or {}).items():
            known = _IO_KEYS.get(kind, ())
            if not isinstance(values, Mapping) or any(key not in known for key in values):
                names = ", ".join(f"{name}.{key}" for name, keys in _IO_KEYS.items() for key in keys)
                yield Problem("{media_io_kwargs} takes {names}", names=names)
                continue
            if not _is_count(values.get("num_frames", _ALL), int, MAX_VIDEO_FRAMES):
                yield Problem("{media_io_kwargs}: num_frames is -1 or from 1 to {most}", most=MAX_VIDEO_FRAMES)
            if not _is_count(values.get("fps", _ALL), (int, float), _MAX_FPS):
                yield Problem("{media_io_kwargs}: fps is -1 or a number up to {most}", most=_MAX_FPS)
            if not _is_colour(values.get("rgba_background_color", (0, 0, 0))):
                yield Problem("{media_io_kwargs}: rgba_background_color is three numbers from 0 to 255")


def _is_count(value: object, kind: type | tuple[type, ...], most: int) -> bool:
    """Whether it is positive and at most that, or -1."""
    return isinstance(value, kind) and not isinstance(value, bool) and (value == _ALL or 0 < value <= most)  # type: ignore[operator]


def _is_colour(value: object) -> bool:
    return (
        isinstance(value, list | tuple) and len(value) == 3
        and all(type(one) is int and 0 <= one <= 255 for one in value)
    )  # fmt: skip
