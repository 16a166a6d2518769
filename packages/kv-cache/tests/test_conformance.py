"""The manager is what the scheduler asks for, although it does not know it."""

import pytest

from llmstack_kv_cache import KVCacheManager


def test_the_manager_passes_the_schedulers_own_check():
    testing = pytest.importorskip("llmstack_core_scheduler.testing")
    testing.check_kv_cache_manager(lambda num_blocks, block_size: KVCacheManager(num_blocks, block_size))
