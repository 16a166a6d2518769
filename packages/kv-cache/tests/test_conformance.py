"""The managers are what the scheduler asks for, although they do not know it."""

import pytest

from llmstack_kv_cache import KVCacheGroup, KVCacheManager


def test_the_manager_passes_the_schedulers_own_check():
    testing = pytest.importorskip("llmstack_core_scheduler.testing")
    testing.check_kv_cache_manager(
        KVCacheManager,
        lambda num_blocks, block_size, num_host_blocks: KVCacheManager(
            num_blocks, block_size, num_host_blocks=num_host_blocks
        ),
    )


def hybrid(num_blocks, block_size, num_host_blocks=0):
    """A manager of one group with as many blocks for requests; the null block comes in addition."""
    group = KVCacheGroup("window", sliding_window=100)
    return KVCacheManager(num_blocks + 1, block_size, num_host_blocks=num_host_blocks, groups=[group])


def test_the_hybrid_manager_passes_the_schedulers_own_check():
    testing = pytest.importorskip("llmstack_core_scheduler.testing")
    testing.check_kv_cache_manager(hybrid, hybrid, num_reserved_blocks=1)
