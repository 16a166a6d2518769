"""Keys of items in the events of a prefix cache, for those outside of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from llmstack_core_scheduler.media_numbers import MediaNumbers, routing_key
from llmstack_kv_cache import BlockStored, KVCacheEvent


def routed(event: KVCacheEvent, numbers: MediaNumbers | None) -> KVCacheEvent:
    """The event with keys that are the same in each engine core: a router makes them of digests.

    An item that the scheduler has forgotten keeps its number, which no prompt is routed by.
    """
    if numbers is None or not isinstance(event, BlockStored) or min(event.token_ids) >= 0:
        return event
    number_to_key = {
        key: routing_key(name[0]) for key in set(event.token_ids) if key < 0 and (name := numbers.name_of(-1 - key))
    }
    return replace(event, token_ids=tuple(number_to_key.get(key, key) for key in event.token_ids))


ExtraKeys = list[list[tuple[str, int]] | None]
"""Of each block the items in it, as digest and first place in the block; None for a block of tokens."""


def published(event: BlockStored, numbers: MediaNumbers | None) -> tuple[Sequence[int], ExtraKeys | None]:
    """The token ids of an event, placeholders where vectors stand, and what tells its blocks apart besides.

    An item that the scheduler has forgotten is named by its number, with token 0: no digest is like it.
    """
    if numbers is None or min(event.token_ids) >= 0:
        return event.token_ids, None
    known = {key: numbers.name_of(-1 - key) for key in set(event.token_ids) if key < 0}
    token_ids, size = list(event.token_ids), event.block_size
    extra_keys: ExtraKeys = []
    for start in range(0, len(token_ids), size):
        items: list[tuple[str, int]] = []
        for place, key in enumerate(event.token_ids[start : start + size]):
            if key < 0:
                name = known[key]
                digest = f"forgotten-{-1 - key}" if name is None else name[0].hex()
                token_ids[start + place] = 0 if name is None else name[1]
                if not any(digest == other for other, _ in items):
                    items.append((digest, place))
        extra_keys.append(items or None)
    return token_ids, extra_keys
