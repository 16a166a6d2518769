"""The media of a served model, by `llmstack-media`."""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, get_args

from llmstack_llm import request_errors
from llmstack_llm.admission.limits import AdmissionLimits
from llmstack_llm.admission.prompt_embeds import read_vectors
from llmstack_llm.media.given_vectors import GivenVectors
from llmstack_llm.media.options import MediaOptions
from llmstack_llm.media.parts import MediaPart
from llmstack_llm.media.processor import MediaRequest, MediaStats, MediaSymbols, OpenedMedia
from llmstack_types import EngineStartError
from llmstack_types.lifecycle import ClosingParts
from llmstack_types.vocabulary import FileKind, MediaKind

if TYPE_CHECKING:
    from llmstack_media import ItemProcessor
    from llmstack_media.fetch.fetcher import Fetcher
    from llmstack_media.front import MediaFront
    from llmstack_media.parts import Part

DEFAULT_MAX_ITEMS = 64
KINDS: Final[tuple[FileKind, ...]] = get_args(FileKind)
"""Those that are prepared out of files."""
_SMALL: Final = (64, 64)
"""Width and height of a picture that no processor cuts."""


class _Room:
    """The places that the media of one prompt can have: they are counted from headers, before the rest is fetched."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._num_tokens = 0

    def take(self, part: Part, opened: OpenedMedia) -> None:
        """Counts an item; raises InvalidRequestError where the context has no room for it and those before."""
        self._num_tokens += sum(num_vectors for _, num_vectors in opened.pieces)
        if self._num_tokens > self._max_tokens:
            raise request_errors.media_too_long(part.param, self._max_tokens, self._num_tokens)


class ServedMedia(ClosingParts):
    """A `MediaProcessor` over the children that decode pictures, videos and sounds."""

    def __init__(self, front: MediaFront, options: MediaOptions, limits: AdmissionLimits, *, is_atomic: bool) -> None:
        """`limits`, `is_atomic`: Those of the model, for vectors in place of pictures."""
        super().__init__(front)
        self._front = front
        self._limits = limits
        self._is_atomic = is_atomic
        self._options = options
        self.symbols: dict[MediaKind, MediaSymbols] = {}
        self.max_items: dict[MediaKind, int] = {}
        for kind in KINDS:
            processor: ItemProcessor[Any] | None = front.processors._asdict()[kind]
            max_items = options.max_items.get(kind, DEFAULT_MAX_ITEMS)
            if processor is None or not max_items:
                continue
            vectors = {piece.text for piece in processor.placeholders(processor.largest()) if piece.num_vectors}
            self.symbols[kind] = MediaSymbols(processor.placeholder, processor.placeholder_in_text, tuple(vectors))
            self.max_items[kind] = max_items
        self.max_bytes, self.max_pixels = front.limits.max_bytes, front.limits.max_image_pixels

    @property
    def stats(self) -> MediaStats:
        """Counts of the work so far."""
        return self._front.stats

    async def open_all(
        self,
        parts: Sequence[MediaPart],
        tenant: str,
        options: Mapping[str, object] | None = None,
        request: MediaRequest | None = None,
    ) -> Sequence[OpenedMedia]:
        """Fetches the items of one prompt and counts them; see `MediaProcessor.open_all`."""
        if request is not None and request.sources is None:
            request.sources = self._front.of_request(tenant)
        room = _Room(self._limits.max_request_tokens)
        given: dict[int, OpenedMedia] = {}
        for index, part in enumerate(parts):
            if part.vectors is not None:
                given[index] = await self._vectors(part)
                room.take(part, given[index])
        rest = [part for part in parts if part.vectors is None]
        opened = await self._front.open_all(
            rest, tenant, {**self._options.processor_options, **(options or {})},
            request=None if request is None else request.sources, on_counted=room.take,
        )  # fmt: skip
        others = iter(opened)
        return [given[index] if index in given else next(others) for index in range(len(parts))]

    async def _vectors(self, part: MediaPart) -> GivenVectors:
        if not self._options.takes_vectors:
            raise request_errors.unsupported_parameter(f"{part.param}.type", "'image_embeds' needs --enable-mm-embeds")
        name = f"{part.param}.image_embeds"
        # In a thread: there are megabytes of base64.
        num_vectors, digest, data = await asyncio.to_thread(read_vectors, part.vectors, self._limits, name)
        return GivenVectors(self._pieces(num_vectors, f"{part.param}.type"), digest, data)

    def _pieces(self, num_vectors: int, param: str) -> list[tuple[str, int]]:
        """The text in the prompt for so many vectors: that of a picture in one run."""
        if (images := self._front.processors.image) is None:
            raise request_errors.unsupported_parameter(param, "this model takes no pictures")
        processor = images.for_detail("low")
        pieces = processor.placeholders(processor.layout(*_SMALL))
        has_one_run = sum(bool(piece.num_vectors) for piece in pieces) == 1
        if self._is_atomic or processor.has_grid_positions or not has_one_run:
            raise request_errors.unsupported_parameter(param, "this model needs more of a picture than its vectors")
        return [(piece.text, num_vectors if piece.num_vectors else 0) for piece in pieces]

    async def start(self) -> None:
        """Starts what decodes; see `MediaProcessor.start`."""
        await self._front.start()


def make_fetcher(options: MediaOptions) -> Fetcher:
    """The fetcher of media under the policy of these options."""
    from llmstack_media.fetch.fetcher import Fetcher
    from llmstack_media.fetch.policy import FetchPolicy

    policy = FetchPolicy(
        options.allowed_domains,
        tuple(map(ipaddress.ip_network, options.allowed_networks)),
        Path(options.local_path).resolve() if options.local_path else None,
        options.has_redirects,
    )
    return Fetcher(policy)


def make_served_media(folder: Path, options: MediaOptions, limits: AdmissionLimits, *, is_atomic: bool) -> ServedMedia:
    """The media of the model in a folder; the last arguments are those of `ServedMedia`.

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
    bounds = MediaLimits(
        max_image_pixels=options.max_image_pixels, max_source_bytes=options.source_bytes,
        max_request_bytes=options.source_bytes // 8, max_audio_s=options.max_audio_s,
    )  # fmt: skip
    try:
        made = MediaFront(
            files, make_fetcher(options), limits=bounds,
            cache_bytes=options.cache_bytes, background=options.background, video_options=options.video,
        )  # fmt: skip
        made.check_options(options.processor_options)
    except ProcessorConfigError as error:
        raise EngineStartError(f"the model takes pictures or sound, but {error} (--language-model-only)") from error
    return ServedMedia(made, options, limits, is_atomic=is_atomic)
