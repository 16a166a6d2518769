"""Cached prefixes that leave a scheduler's cache, or enter it from another one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from llmstack_core_scheduler.media_numbers import MediaNumbers, media_keys, media_within
from llmstack_core_scheduler.protocols import KVCacheManager
from llmstack_types import InvalidRequestError, PrefixMedia
from llmstack_types.media import NO_MEDIA

_OWNER: Final = "\x00import"
"""Stands for a request while blocks are allocated; no request has this id."""

_STEP_BLOCKS: Final = 16
"""How many blocks a prefix gains at once, before windows pass others of it."""

PrefixBlocks = tuple[list[int], int]
"""The blocks of a prefix, and the block of the state behind it; 0 for none."""


class PrefixTransfer:
    """Reads the cached prefixes of one cache for other engine cores, and adds theirs."""

    def __init__(self, manager: KVCacheManager, numbers: MediaNumbers | None = None) -> None:
        """`numbers`: Of the items in the keys of the cache; None for a model of tokens."""
        self._manager, self._numbers = manager, numbers or MediaNumbers()

    def cached(self, token_ids: Sequence[int], salt: str, media: PrefixMedia = NO_MEDIA) -> PrefixBlocks:
        """The blocks of the longest cached prefix, at most all but the last token, and the block of its state.

        Only as far as that state; it is 0 for a model without states. The null block stands where a window has passed,
        but in the group whose blocks tell the prefix.
        """
        if media.items:
            known = self._numbers.known(token_ids, media_within(media, len(token_ids)))
            token_ids = media_keys(token_ids, known)
        block_ids, _ = self._manager.get_computed_blocks(_OWNER, token_ids, salt)
        return self._manager.known_prefix(block_ids, token_ids, salt)

    def receive(self, token_ids: Sequence[int], salt: str, media: PrefixMedia = NO_MEDIA) -> PrefixBlocks:
        """Makes the whole blocks before the last token findable; those that the caller fills before the next step.

        They hold the end of the prefix: what comes before is cached already. Empty if nothing is missing, or if there
        is no room. No request holds the blocks: later allocations may evict them. The second number is the block that
        the caller fills with the state after them; 0 for none. Items get the numbers that the request has later.
        The null block stands where a window has passed, and is not filled.
        """
        manager = self._manager
        if media.items:
            try:
                numbered = self._numbers.number(token_ids, media_within(media, len(token_ids)))
            except InvalidRequestError:  # there are no numbers left
                return [], 0
            token_ids = media_keys(token_ids, numbered)
        num_blocks = (len(token_ids) - 1) // manager.block_size
        num_tokens = num_blocks * manager.block_size
        # Under another name than blocks are allocated for: the figures count the lookups of requests alone.
        found_block_ids, num_found_tokens = manager.get_computed_blocks("", token_ids, salt)
        if num_tokens <= num_found_tokens:
            return [], 0
        if not self._allocate(num_blocks, found_block_ids, salt):
            return [], 0
        block_ids = manager.block_table(_OWNER)
        manager.cache_blocks(_OWNER, token_ids, num_tokens)
        state_id = 0
        if manager.has_states:
            _, state_id = manager.advance_state(_OWNER, num_tokens)
            manager.end_step()  # it is written before the next one
        manager.free(_OWNER)
        return block_ids[len(found_block_ids) :], state_id

    def _allocate(self, num_blocks: int, found_block_ids: list[int], salt: str) -> bool:
        """Takes blocks for a prefix; False if there are too few.

        Windows pass blocks before they are findable: only those can be found that a lookup of the whole prefix needs.
        """
        manager = self._manager
        size, num_found = manager.block_size, len(found_block_ids) // manager.num_groups
        if not manager.has_windows:
            return manager.allocate_slots(_OWNER, num_blocks * size, found_block_ids, salt) is not None
        needed = manager.num_blocks_needed(num_blocks * size, num_found * size, _STEP_BLOCKS * size)
        if needed > manager.num_free_blocks:  # so that nothing is evicted in vain
            return False
        for end in (*range(num_found + _STEP_BLOCKS, num_blocks, _STEP_BLOCKS), num_blocks):
            if manager.allocate_slots(_OWNER, end * size, found_block_ids, salt) is None:
                manager.free(_OWNER)
                return False
            found_block_ids = []
            manager.advance(_OWNER, end * size, keeps_leader=True)
        return True
