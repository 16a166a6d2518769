"""Operations on the cache of a scheduler besides those of its steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from llmstack_core_scheduler.encoding import Encoding, forget_media
from llmstack_core_scheduler.prefix_transfer import PrefixBlocks, PrefixTransfer
from llmstack_core_scheduler.protocols import KVCacheManager
from llmstack_types import PrefixMedia, SessionReturn
from llmstack_types.media import NO_MEDIA


class CacheOperations:
    """The base of the scheduler: what is asked of its cache between two steps."""

    _kv_cache_manager: KVCacheManager
    _prefixes: PrefixTransfer
    _encoding: Encoding | None

    @property
    def kv_cache_manager(self) -> KVCacheManager:
        """The cache that its requests use."""
        return self._kv_cache_manager

    def reset_prefix_cache(self) -> bool:
        """Forgets cached prefixes, and what is encoded; False while requests are running."""
        if is_done := self._kv_cache_manager.reset_prefix_cache():
            forget_media(self._encoding)
        return is_done

    def release_sessions(self, owner: str, name: str) -> tuple[int, int]:
        """Gives up the sessions of an owner that have a name; how many there were, and the tokens that are forgotten.

        What others share stays, and what requests hold does until they end.
        """
        return self._kv_cache_manager.release_sessions(owner, name)

    def take_returns(self) -> list[SessionReturn]:
        """The sessions that have gone on since the last call."""
        return [SessionReturn(*one) for one in self._kv_cache_manager.sessions.take_returns()]

    def cached_prefix(self, token_ids: Sequence[int], salt: str = "", media: PrefixMedia = NO_MEDIA) -> PrefixBlocks:
        """The blocks of the longest cached prefix, and of its state, as `PrefixTransfer.cached`. It decides nothing."""
        return self._prefixes.cached(token_ids, salt, media)

    def contents(self, block_ids: Iterable[int]) -> list[int]:
        """The contents of cached blocks, as `KVCacheManager.contents`. It decides nothing."""
        return self._kv_cache_manager.contents(block_ids)

    def import_prefix(self, token_ids: Sequence[int], salt: str = "", media: PrefixMedia = NO_MEDIA) -> PrefixBlocks:
        """Makes a prefix findable; the blocks to be filled before a step, as `PrefixTransfer.receive`."""
        return self._prefixes.receive(token_ids, salt, media)
