"""Events about cached prefixes, for routers that send requests to them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Blocks that can be found from now on, each the parent of the next.

    Attributes:
        identities: Content identity of each; never used twice in the life of a cache.
        parent_identity: The identity of the content before the first block; 0 if the prefix begins here.
        token_ids: The tokens of all blocks, `block_size` each.
        salt: The salt of a prefix that begins here, empty for what continues one. It may be a secret of the tenant, so
            it stays in this process.
        group: The group of layers whose blocks these are; None where there is one only.
    """

    identities: tuple[int, ...]
    parent_identity: int
    token_ids: tuple[int, ...]
    block_size: int
    salt: str = field(default="", repr=False)
    group: int | None = None


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """Contents that can no longer be found, nor anything that was chained to them."""

    identities: tuple[int, ...]
    group: int | None = None


@dataclass(frozen=True, slots=True)
class CompanionStored:
    """Blocks of a further group, or states, that can be found from now on by contents that were stored before.

    Attributes:
        identities: Of the contents.
        group: The group, by its number; states come after all groups with block tables.
    """

    identities: tuple[int, ...]
    block_size: int
    group: int


@dataclass(frozen=True, slots=True)
class CompanionRemoved:
    """Blocks of a further group, or states, that can no longer be found; their contents may have gone before."""

    identities: tuple[int, ...]
    group: int


@dataclass(frozen=True, slots=True)
class AllCleared:
    """Event after which no block can be found."""


KVCacheEvent = BlockStored | BlockRemoved | CompanionStored | CompanionRemoved | AllCleared


class EventLog:
    """Events not fetched yet, the oldest first; over `max_events` the oldest are dropped and counted."""

    def __init__(self, max_events: int) -> None:
        self._events: deque[KVCacheEvent] = deque(maxlen=max_events)
        self._num_dropped = 0

    def add(self, event: KVCacheEvent) -> None:
        """Appends an event, and drops the oldest one of a full log."""
        self._num_dropped += len(self._events) == self._events.maxlen
        self._events.append(event)

    def clear(self) -> None:
        """Everything has been cleared, so that what came before need not be known."""
        self._events.clear()
        self._num_dropped = 0
        self.add(AllCleared())

    def fetch(self) -> tuple[list[KVCacheEvent], int]:
        """The events since the last fetch, and how many before them were given up."""
        events, num_dropped = list(self._events), self._num_dropped
        self._events.clear()
        self._num_dropped = 0
        return events, num_dropped
