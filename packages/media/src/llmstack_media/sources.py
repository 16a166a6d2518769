"""Bytes of media as they came, counted while they are held."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from queue import SimpleQueue

from llmstack_media.errors import image_too_large
from llmstack_media.shares import Shares
from llmstack_types import ServerOverloadedError


class SourceBytes:
    """The bytes that requests of all keys hold until they are decoded. Used by any thread."""

    def __init__(self, max_bytes: int, max_request_bytes: int) -> None:
        """`max_bytes`: Of all keys together. `max_request_bytes`: Of one request."""
        self._max_request_bytes = max_request_bytes
        self._shares = Shares(max_bytes)
        self._lock = threading.Lock()
        self._freed: SimpleQueue[tuple[str, int]] = SimpleQueue()

    @property
    def held(self) -> int:
        """Bytes that are held now."""
        with self._lock:
            self._settle()
            return self._shares.held

    def of_request(self, tenant: str) -> RequestSources:
        """The count of one request."""
        return RequestSources(self, tenant)

    def take(self, request: RequestSources, num_bytes: int) -> None:
        """Counts bytes of a request that are about to be read.

        Raises:
            InvalidRequestError: The media of this request have too many together.
            ServerOverloadedError: The requests of this key or of all hold too much.
        """
        with self._lock:
            self._settle()
            if request.num_bytes + num_bytes > self._max_request_bytes:
                limit = self._max_request_bytes
                raise image_too_large(f"takes its request over the {limit} bytes that its media may have together")
            if not self._shares.take(request.tenant, num_bytes):
                raise ServerOverloadedError("media that wait to be read take all memory for them", reason="media")
            request.num_bytes += num_bytes

    def free(self, tenant: str, num_bytes: int) -> None:
        """Gives bytes back. A destructor may call it at any point of any thread, so it takes no lock."""
        self._freed.put((tenant, num_bytes))

    def _settle(self) -> None:
        while not self._freed.empty():
            tenant, num_bytes = self._freed.get()
            self._shares.add(tenant, -num_bytes)


@dataclass(slots=True)
class RequestSources:
    """The number of bytes that one request holds so far.

    Attributes:
        num_bytes: Changed by `SourceBytes.take` alone.
    """

    sources: SourceBytes
    tenant: str
    num_bytes: int = 0

    def hold(self) -> HeldSource:
        """The count of one of its items."""
        return HeldSource(self)


class HeldSource:
    """One item's bytes: counted until `free`, or until nothing refers to this any more.

    A request may end between its count and its decode in many places, and none of them has to know of this.

    Attributes:
        data: The bytes, once they are read.
    """

    def __init__(self, request: RequestSources) -> None:
        self._request = request
        self._num_bytes = 0
        self.data = b""

    def reserve(self, num_bytes: int) -> None:
        """Counts bytes that are about to be read; raises as `SourceBytes.take`."""
        self._request.sources.take(self._request, num_bytes)
        self._num_bytes += num_bytes

    def free(self) -> None:
        """Forgets the bytes. Idempotent."""
        self.data = b""
        num_bytes, self._num_bytes = self._num_bytes, 0
        if num_bytes:
            self._request.sources.free(self._request.tenant, num_bytes)

    def __del__(self) -> None:
        self.free()
