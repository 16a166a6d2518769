"""Media of one prompt from open to released."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from llmstack_llm.media.parts import MediaPart
from llmstack_llm.media.placeholders import PlacedMedia
from llmstack_llm.media.processor import MediaProcessor, MediaRequest, OpenedMedia, PreparedMedia
from llmstack_types import MediaItem
from llmstack_types.vocabulary import MediaKind


class PreparedItems:
    """The decoded media of one prompt, until `release`.

    Attributes:
        items: For the engine request.
    """

    def __init__(self, placed: Sequence[PlacedMedia], prepared: Sequence[PreparedMedia]) -> None:
        self._prepared = prepared
        self.items: tuple[MediaItem, ...] = tuple(
            one.item(place.offset, place.num_tokens, place.embed_runs)
            for place, one in zip(placed, prepared, strict=True)
        )

    def release(self) -> None:
        """Ends the use by the request. Idempotent."""
        for one in self._prepared:
            one.release()


async def open_all(
    processor: MediaProcessor,
    parts: Sequence[MediaPart],
    tenant: str,
    options: Mapping[str, object] | None = None,
    request: MediaRequest | None = None,
) -> list[tuple[MediaKind, OpenedMedia]]:
    """The parts of one prompt with their kinds; see `MediaProcessor.open_all`."""
    opened = await processor.open_all(parts, tenant, options, request)
    return [(part.kind, one) for part, one in zip(parts, opened, strict=True)]


async def prepare_all(placed: Sequence[PlacedMedia]) -> PreparedItems:
    """Decodes the items of a prompt, together; if one fails, all are released.

    Raises:
        InvalidRequestError, ServerOverloadedError: As `OpenedMedia.prepare`.
    """
    from llmstack_media.together import run_together  # late: it is there already where something is opened

    prepared: list[PreparedMedia] = []

    async def prepare(place: PlacedMedia) -> PreparedMedia:
        one = await place.opened.prepare()
        prepared.append(one)
        return one

    try:
        in_order = await run_together([prepare(place) for place in placed])
        return PreparedItems(placed, in_order)
    except BaseException:
        for one in prepared:
            one.release()
        raise
