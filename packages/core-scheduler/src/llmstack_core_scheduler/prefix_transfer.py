"""Cached prefixes that leave a scheduler's cache, or enter it from another one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from llmstack_core_scheduler.protocols import KVCacheManager

_OWNER: Final = "\x00import"
"""Stands for a request while blocks are allocated; no request has this id."""


class PrefixTransfer:
    """Reads the cached prefixes of one cache for other engine cores, and adds theirs."""

    def __init__(self, manager: KVCacheManager) -> None:
        self._manager = manager

    def cached(self, token_ids: Sequence[int], salt: str) -> list[int]:
        """The blocks of the longest cached prefix, at most all but the last token."""
        return self._manager.get_computed_blocks(_OWNER, token_ids, salt)[0]

    def receive(self, token_ids: Sequence[int], salt: str) -> list[int]:
        """Makes the whole blocks before the last token findable; those that the caller fills before the next step.

        They hold the end of the prefix: what comes before is cached already. Empty if nothing is missing, or if there
        is no room. No request holds the blocks: later allocations may evict them.
        """
        manager = self._manager
        num_tokens = (len(token_ids) - 1) // manager.block_size * manager.block_size
        # Under another name than blocks are allocated for: the figures count the lookups of requests alone.
        found_block_ids, num_found_tokens = manager.get_computed_blocks("", token_ids, salt)
        if num_tokens <= num_found_tokens:
            return []
        block_ids = manager.allocate_slots(_OWNER, num_tokens, found_block_ids, salt)
        if block_ids is None:
            return []
        manager.cache_blocks(_OWNER, token_ids, num_tokens)
        manager.free(_OWNER)
        return block_ids[len(found_block_ids) :]
