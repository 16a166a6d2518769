"""The media of a served model, by `llmstack-media`."""

from __future__ import annotations

import importlib
import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmstack_llm.media.parts import MediaPart
from llmstack_llm.media.processor import MediaSymbols, OpenedMedia
from llmstack_types import EngineStartError
from llmstack_types.vocabulary import MediaKind

if TYPE_CHECKING:
    from llmstack_media.front import MediaFront

DEFAULT_MAX_ITEMS = 64


@dataclass(frozen=True, slots=True)
class MediaOptions:
    """How media of requests are fetched, counted and kept.

    Attributes:
        whole: The class of a checkpoint with parts beside its text, unless its text alone is asked for.
        max_items: Items of a kind in one prompt at most, where they are limited.
        cache_bytes: Of decoded items that are kept for later requests.
        max_image_pixels: Width × height of a picture at most.
        allowed_domains: Hosts whose URLs are fetched; `*` is every public one.
        allowed_networks: Networks of private addresses that may be dialled.
        local_path: Folder of which `file:` URLs are read; None for none.
        has_redirects: Whether redirects are followed.
        processor_options: Of the model's processor, for every request.
        background: Colour (red, green, blue) under transparent parts; None for white.
    """

    whole: str = ""
    max_items: Mapping[str, int] = field(default_factory=dict)
    cache_bytes: int = 4 << 30
    max_image_pixels: int = 50_000_000
    allowed_domains: tuple[str, ...] = ()
    allowed_networks: tuple[str, ...] = ()
    local_path: Path | None = None
    has_redirects: bool = True
    processor_options: Mapping[str, Any] = field(default_factory=dict)
    background: tuple[int, int, int] | None = None


class ServedMedia:
    """A `MediaProcessor` over the children that decode pictures."""

    def __init__(self, front: MediaFront, options: MediaOptions) -> None:
        self._front = front
        self._options = options
        symbols = MediaSymbols(front.processor.placeholder, front.processor.placeholder_in_text)
        self.symbols: Mapping[MediaKind, MediaSymbols] = {"image": symbols}
        self.max_items: Mapping[MediaKind, int] = {"image": options.max_items.get("image", DEFAULT_MAX_ITEMS)}

    async def open(self, part: MediaPart, tenant: str, options: Mapping[str, object] | None = None) -> OpenedMedia:
        """Fetches an item and counts it; see `MediaProcessor.open`."""
        return await self._front.open(part, tenant, {**self._options.processor_options, **(options or {})})

    async def shutdown(self) -> None:
        """Ends the children that decode. Idempotent."""
        await self._front.shutdown()


def make_served_media(folder: Path, options: MediaOptions) -> ServedMedia:
    """The media of the model in a folder.

    Raises:
        EngineStartError: `llmstack-media` is not installed, or the checkpoint's processor is not supported.
    """
    from llmstack_model_files import read_json

    try:
        front = importlib.import_module("llmstack_media.front")
    except ImportError as error:
        raise EngineStartError("the model takes pictures, which need llmstack-media") from error
    from llmstack_media.errors import ProcessorConfigError
    from llmstack_media.fetch.fetcher import Fetcher
    from llmstack_media.fetch.policy import FetchPolicy
    from llmstack_media.limits import MediaLimits

    names = {"preprocessor": "preprocessor_config", "processor": "processor_config", "tokenizer": "tokenizer_config"}
    files = {key: read_json(folder, f"{name}.json", required=False) for key, name in names.items()}
    files["model"] = read_json(folder, "config.json")  # whole, with the parts that are not for text
    policy = FetchPolicy(
        options.allowed_domains,
        tuple(map(ipaddress.ip_network, options.allowed_networks)),
        options.local_path,
        options.has_redirects,
    )
    try:
        made = front.MediaFront(
            files, Fetcher(policy), limits=MediaLimits(max_image_pixels=options.max_image_pixels),
            cache_bytes=options.cache_bytes, background=options.background,
        )  # fmt: skip
        made.processor.with_options(options.processor_options)
    except ProcessorConfigError as error:
        raise EngineStartError(f"the model takes pictures, but {error} (--language-model-only)") from error
    return ServedMedia(made, options)
