"""The media of a served model, by `llmstack-media`."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from llmstack_llm.media.options import MediaOptions
from llmstack_llm.media.parts import MediaPart
from llmstack_llm.media.processor import MediaStats, MediaSymbols, OpenedMedia
from llmstack_types import EngineStartError
from llmstack_types.vocabulary import MediaKind

if TYPE_CHECKING:
    from llmstack_media import PixelProcessor
    from llmstack_media.fetch.fetcher import Fetcher
    from llmstack_media.front import MediaFront

DEFAULT_MAX_ITEMS = 64
KINDS: Final[tuple[MediaKind, ...]] = ("image", "video")
"""Those that are prepared out of files."""


class ServedMedia:
    """A `MediaProcessor` over the children that decode pictures and videos."""

    def __init__(self, front: MediaFront, options: MediaOptions) -> None:
        self._front = front
        self._options = options
        self.symbols: dict[MediaKind, MediaSymbols] = {}
        self.max_items: dict[MediaKind, int] = {}
        for kind in KINDS:
            processor: PixelProcessor[Any] | None = front.processors._asdict()[kind]
            max_items = options.max_items.get(kind, DEFAULT_MAX_ITEMS)
            if processor is None or not max_items:
                continue
            vectors = {piece.text for piece in processor.placeholders(processor.largest()) if piece.num_vectors}
            self.symbols[kind] = MediaSymbols(processor.placeholder, processor.placeholder_in_text, tuple(vectors))
            self.max_items[kind] = max_items
        self.max_bytes, self.max_pixels = front.limits.max_bytes, front.limits.max_image_pixels

    @property
    def stats(self) -> MediaStats:
        """What has been done so far."""
        return self._front.stats

    async def open_all(
        self, parts: Sequence[MediaPart], tenant: str, options: Mapping[str, object] | None = None
    ) -> Sequence[OpenedMedia]:
        """Fetches the items of one request and counts them; see `MediaProcessor.open_all`."""
        return await self._front.open_all(parts, tenant, {**self._options.processor_options, **(options or {})})

    async def start(self) -> None:
        """Starts what decodes; see `MediaProcessor.start`."""
        await self._front.start()

    async def shutdown(self) -> None:
        """Ends the children that decode. Idempotent."""
        await self._front.shutdown()


def make_fetcher(options: MediaOptions) -> Fetcher:
    """What fetches media under the policy of these options."""
    from llmstack_media.fetch.fetcher import Fetcher
    from llmstack_media.fetch.policy import FetchPolicy

    policy = FetchPolicy(
        options.allowed_domains,
        tuple(map(ipaddress.ip_network, options.allowed_networks)),
        Path(options.local_path).resolve() if options.local_path else None,
        options.has_redirects,
    )
    return Fetcher(policy)


def make_served_media(folder: Path, options: MediaOptions) -> ServedMedia:
    """The media of the model in a folder.

    Raises:
        EngineStartError: The checkpoint's processor is not supported.
    """
    from llmstack_media.errors import ProcessorConfigError
    from llmstack_media.front import MediaFront
    from llmstack_media.limits import MediaLimits
    from llmstack_model_files import read_json

    names = {"preprocessor": "preprocessor_config", "processor": "processor_config", "tokenizer": "tokenizer_config",
             "video_preprocessor": "video_preprocessor_config"}  # fmt: skip
    files = {key: read_json(folder, f"{name}.json", required=False) for key, name in names.items()}
    files["model"] = read_json(folder, "config.json")  # whole, with the parts that are not for text
    limits = MediaLimits(
        max_image_pixels=options.max_image_pixels, max_source_bytes=options.source_bytes,
        max_request_bytes=options.source_bytes // 8,
    )  # fmt: skip
    try:
        made = MediaFront(
            files, make_fetcher(options), limits=limits,
            cache_bytes=options.cache_bytes, background=options.background, video_options=options.video,
        )  # fmt: skip
        made.check_options(options.processor_options)
    except ProcessorConfigError as error:
        raise EngineStartError(f"the model takes pictures, but {error} (--language-model-only)") from error
    return ServedMedia(made, options)
