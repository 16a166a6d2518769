"""Changes of the prefix cache, for routers and other processes that follow it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, Protocol

from llmstack_core_scheduler.media_numbers import MediaNumbers
from llmstack_engine_core.media_keys import routed
from llmstack_engine_core.messages.protocol import CacheUpdate
from llmstack_kv_cache import CachedSegments, KVCacheEvent, KVCacheManager
from llmstack_kv_cache.segments import pack_keys

# A step stores at most one run per 64 blocks and request, and removes as many.
MAX_EVENTS_PER_STEP: Final = 65_536


class EventPublisher(Protocol):
    """Sends the events of a cache to other programs."""

    def publish(self, events: Iterable[KVCacheEvent], *, is_whole: bool) -> bool:
        """Sends events and never waits; False where some are lost, so that everything has to be sent again.

        `is_whole`: They are everything that is cached, so what came before is void.
        """
        ...

    def close(self) -> None:
        """Sends what waits, and ends."""
        ...


class CacheNews:
    """Reads the events of one cache after each step. Without followers the cache notes no events.

    Used by the engine core's thread.

    Attributes:
        is_followed: Whether there is a follower or a publisher.
    """

    def __init__(
        self, cache: KVCacheManager, publisher: EventPublisher | None = None, numbers: MediaNumbers | None = None
    ) -> None:
        """`publisher`: Gets the events themselves, from the beginning. `numbers`: Of the items in keys below 0."""
        self._numbers = numbers
        self._cache = cache
        self._publisher = publisher
        self._segments: CachedSegments | None = None
        self._number = 0
        self._is_published = True
        self.is_followed = publisher is not None
        if publisher is not None:
            cache.start_events(MAX_EVENTS_PER_STEP)
            self._is_published = publisher.publish((), is_whole=True)

    def follow(self) -> CacheUpdate:
        """Everything that is cached; for a follower, which gets each further `take` too.

        Call `take` before it, for those who follow already.
        """
        self.read()
        self.is_followed = True
        if self._segments is None:
            self._cache.start_events(MAX_EVENTS_PER_STEP)
            self._segments = CachedSegments(self._cache.block_size)
            for event in self._cache.stored():
                self._segments.apply(routed(event, self._numbers))
            self._segments.take()
        return CacheUpdate(self._number, True, pack_keys(list(self._segments.keys)))

    def read(self) -> None:
        """Reads the events since the last call; where some were given up, everything that is stored."""
        if not self.is_followed:
            return
        events, num_dropped = self._cache.fetch_events()
        if self._publisher is not None:
            self._publish(self._publisher, events, num_dropped)
        if self._segments is None:
            return
        if num_dropped:
            self._segments.clear()
        for event in self._cache.stored() if num_dropped else events:
            self._segments.apply(routed(event, self._numbers))

    def _publish(self, publisher: EventPublisher, events: Sequence[KVCacheEvent], num_dropped: int) -> None:
        if num_dropped or not self._is_published:
            self._is_published = publisher.publish(self._cache.stored(), is_whole=True)
        elif events:
            self._is_published = publisher.publish(events, is_whole=False)

    def take(self) -> CacheUpdate | None:
        """The updates for followers of the cache since the last call."""
        if self._segments is None or not self._segments.has_changes:
            return None
        self._number += 1
        was_cleared, added, removed = self._segments.take()
        return CacheUpdate(self._number, was_cleared, pack_keys(added), pack_keys(removed))

    def close(self) -> None:
        """Sends what waits in the publisher, and ends it."""
        if self._publisher is not None:
            self._publisher.close()
