"""Media of one prompt from open to released."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from llmstack_llm.media.parts import MediaPart
from llmstack_llm.media.placeholders import PlacedMedia
from llmstack_llm.media.processor import MediaProcessor, OpenedMedia, PreparedMedia
from llmstack_types import MediaItem
from llmstack_types.vocabulary import MediaKind

ResultT = TypeVar("ResultT")


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
    processor: MediaProcessor, parts: Sequence[MediaPart], tenant: str, options: Any = None
) -> list[tuple[MediaKind, OpenedMedia]]:
    """Fetches and counts the parts, together; the first that fails ends the others.

    Raises:
        InvalidRequestError, ServerOverloadedError: As `MediaProcessor.open`.
    """
    opened = await _together([processor.open(part, tenant, options) for part in parts])
    return [(part.kind, one) for part, one in zip(parts, opened, strict=True)]


async def prepare_all(placed: Sequence[PlacedMedia]) -> PreparedItems:
    """Decodes the items of a prompt, together; if one fails, all are released.

    Raises:
        InvalidRequestError, ServerOverloadedError: As `OpenedMedia.prepare`.
    """
    prepared: list[PreparedMedia] = []

    async def prepare(place: PlacedMedia) -> PreparedMedia:
        one = await place.opened.prepare()
        prepared.append(one)
        return one

    try:
        in_order = await _together([prepare(place) for place in placed])
        return PreparedItems(placed, in_order)
    except BaseException:
        for one in prepared:
            one.release()
        raise


async def _together(work: Sequence[Coroutine[Any, Any, ResultT]]) -> list[ResultT]:
    """The results in order. If one fails, the others are cancelled and waited for, and its exception is raised."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
