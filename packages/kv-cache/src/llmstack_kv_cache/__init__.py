"""A paged KV cache with prefix caching, usable inside any engine.

Standard library only; `llmstack_kv_cache.storage` and `llmstack_kv_cache.slot_mapping` need the extra `[torch]`.
"""

from llmstack_kv_cache.block import num_blocks_for
from llmstack_kv_cache.errors import DuplicateRequestError, KVCacheError, KVCacheIntegrityError, UnknownRequestError
from llmstack_kv_cache.events import (
    AllCleared,
    BlockRemoved,
    BlockStored,
    CompanionRemoved,
    CompanionStored,
    KVCacheEvent,
)
from llmstack_kv_cache.groups import NULL_BLOCK_ID, KVCacheGroup
from llmstack_kv_cache.kv_cache_manager import KVCacheManager
from llmstack_kv_cache.segments import CachedSegments, segment_blocks, segment_keys
from llmstack_kv_cache.state_pool import EMPTY_STATE_ID
from llmstack_kv_cache.stats import KVCacheStats

__all__ = [
    "EMPTY_STATE_ID",
    "NULL_BLOCK_ID",
    "AllCleared",
    "BlockRemoved",
    "BlockStored",
    "CachedSegments",
    "CompanionRemoved",
    "CompanionStored",
    "DuplicateRequestError",
    "KVCacheError",
    "KVCacheEvent",
    "KVCacheGroup",
    "KVCacheIntegrityError",
    "KVCacheManager",
    "KVCacheStats",
    "UnknownRequestError",
    "num_blocks_for",
    "segment_blocks",
    "segment_keys",
]
