"""Bytes of items that come in messages of their own, before their request."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from llmstack_engine_core.messages.protocol import MediaBytes
from llmstack_types import EngineCoreRequest, InvalidRequestError, MediaItem, MediaMemory

MAX_ARRIVING_BYTES: Final = 1 << 30
"""Of all requests that have not come yet."""


class ArrivingMedia:
    """Collects them, by the client that sends them and the request's id."""

    def __init__(self, max_bytes: int = MAX_ARRIVING_BYTES) -> None:
        """`max_bytes`: Of all that is held. What is beyond is dropped, and its request is refused when it comes."""
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._parts: dict[tuple[bytes, str], list[bytes]] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes that are held."""
        return self._num_bytes

    def add(self, client: bytes, message: MediaBytes) -> None:
        """Takes the next bytes of a request's items, in the order of the items."""
        if self._num_bytes + len(message.data) > self._max_bytes:
            self.drop(client, message.request_id)
            return
        self._parts.setdefault((client, message.request_id), []).append(message.data)
        self._num_bytes += len(message.data)

    def complete(self, client: bytes, request: EngineCoreRequest) -> EngineCoreRequest:
        """The request with the bytes that came before it, in the items that have none; nothing of it is held then.

        Raises:
            InvalidRequestError: They are not those of its items.
        """
        parts = self._taken(client, request.request_id)
        if not parts:
            return request
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        start, media = 0, []
        for item in request.media:
            if _has_no_bytes(item.memory):
                item, start = _with_bytes(item, data, start)
            media.append(item)
        if start != len(data):
            raise InvalidRequestError(f"Its items have {start} bytes, and {len(data)} came.", param="media")
        return replace(request, media=tuple(media))

    def drop(self, client: bytes, request_id: str | None = None) -> None:
        """Forgets what came for a request, or all that came from a client."""
        ids = [one for sender, one in self._parts if sender == client] if request_id is None else [request_id]
        for one in ids:
            self._taken(client, one)

    def _taken(self, client: bytes, request_id: str) -> list[bytes]:
        parts = self._parts.pop((client, request_id), [])
        self._num_bytes -= sum(map(len, parts))
        return parts


def _has_no_bytes(memory: MediaMemory | None) -> bool:
    return memory is not None and not memory.path and not memory.data


def _with_bytes(item: MediaItem, data: bytes, start: int) -> tuple[MediaItem, int]:
    """The item with its part of the data, and where the next one's begins."""
    num_bytes = 0 if item.memory is None else item.memory.num_bytes
    end = start + num_bytes
    return replace(item, memory=MediaMemory(num_bytes, data=data[start:end])), end
