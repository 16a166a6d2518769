"""Test doubles of cache and runner in plain Python, and a conformance check."""

from llmstack_core_scheduler.testing.check_kv_cache_manager import check_kv_cache_manager
from llmstack_core_scheduler.testing.decision_hash import DecisionHash
from llmstack_core_scheduler.testing.fake_encoder import FakeEncoder, WrongMediaError, seen_ids
from llmstack_core_scheduler.testing.fake_kv_cache_manager import FakeKVCacheManager
from llmstack_core_scheduler.testing.fake_model_runner import FakeModelRunner, WrongKVError, next_token

__all__ = [
    "DecisionHash",
    "FakeEncoder",
    "FakeKVCacheManager",
    "FakeModelRunner",
    "WrongKVError",
    "WrongMediaError",
    "check_kv_cache_manager",
    "next_token",
    "seen_ids",
]
