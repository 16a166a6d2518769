"""A processor of pictures that counts what is opened, decoded and released."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from llmstack_llm.media.parts import MediaPart
from llmstack_llm.media.processor import MediaRequest, MediaSymbols
from llmstack_types import InvalidRequestError, MediaItem, MediaMemory
from llmstack_types.vocabulary import MediaKind

PIECES = (("<row>", 0), ("<image>", 3), ("|", 0), ("<image>", 2), ("<row>", 0))


class FakePictures:
    """Pictures by their URL; `broken:…` fails when it is decoded, `absent:…` when it is opened."""

    def __init__(self, max_items: int = 4) -> None:
        self.symbols: Mapping[MediaKind, MediaSymbols] = {"image": MediaSymbols("<image>", "<image>", ("<image>",))}
        self.max_items: Mapping[MediaKind, int] = {"image": max_items}
        self.max_bytes, self.max_pixels = 1 << 20, 1 << 22
        self.stats: Any = None  # nothing here reads it
        self.opened: list[tuple[str, str]] = []
        self.decoded: list[str] = []
        self.closed: list[str] = []
        self.num_held = 0
        self.is_started = False

    async def open_all(
        self,
        parts: Sequence[MediaPart],
        tenant: str,
        options: Mapping[str, object] | None = None,
        request: MediaRequest | None = None,
    ) -> list[FakeOpened]:
        await asyncio.sleep(0)
        for part in parts:
            if part.url.startswith("absent:"):
                raise InvalidRequestError("There is none.", param=part.param, code="media_fetch_failed")
            self.opened.append((part.url, tenant))
        return [FakeOpened(self, part.url) for part in parts]

    async def start(self) -> None:
        self.is_started = True

    async def shutdown(self) -> None:
        """There is nothing to end."""


class FakeOpened:
    pieces = PIECES

    def __init__(self, pictures: FakePictures, url: str) -> None:
        self._pictures, self._url = pictures, url

    def close(self) -> None:
        self._pictures.closed.append(self._url)

    async def prepare(self) -> FakePrepared:
        await asyncio.sleep(0)
        if self._url.startswith("broken:"):
            raise InvalidRequestError("It is damaged.", param="messages", code="invalid_image")
        self._pictures.decoded.append(self._url)
        self._pictures.num_held += 1
        return FakePrepared(self._pictures, self._url)


class FakePrepared:
    def __init__(self, pictures: FakePictures, url: str) -> None:
        self._pictures, self._url, self._is_held = pictures, url, True

    def item(self, offset: int, num_tokens: int, embed_runs: tuple[tuple[int, int], ...] = ()) -> MediaItem:
        digest = hashlib.sha256(self._url.encode()).digest()
        return MediaItem(digest, "image", offset, num_tokens, embed_runs, memory=MediaMemory(1, data=b"x"))

    def release(self) -> None:
        self._pictures.num_held -= self._is_held
        self._is_held = False
