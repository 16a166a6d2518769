"""The configurations of several engine cores."""

from __future__ import annotations

from llmstack_engine_client import engine_configs
from llmstack_engine_core import EngineConfig
from llmstack_engine_core.kv_events import KVEventsConfig
from llmstack_types import ModelRunnerConfig


def test_each_engine_core_publishes_at_its_own_endpoint() -> None:
    events = KVEventsConfig(True, replay_endpoint="ipc:///run/replay")
    config = EngineConfig(ModelRunnerConfig("echo", num_engines=2), runner="echo", kv_events=events)
    found = [one.kv_events.endpoints for one in engine_configs(config) if one.kv_events]
    assert found == [
        ("tcp://127.0.0.1:5557", "ipc:///run/replay"),
        ("tcp://127.0.0.1:5558", "ipc:///run/replay_dp1"),
    ]
    assert EngineConfig.from_plain(config.to_plain()) == config


def test_each_engine_core_has_a_folder_of_its_own_on_disk() -> None:
    config = EngineConfig(ModelRunnerConfig("echo", num_engines=2), kv_cache_dir="/cache", kv_cache_disk_bytes=10 << 30)
    found = [(one.kv_cache_dir, one.kv_cache_disk_bytes) for one in engine_configs(config)]
    assert found == [("/cache.0", 5 << 30), ("/cache.1", 5 << 30)]
    assert EngineConfig.from_plain(config.to_plain()) == config
