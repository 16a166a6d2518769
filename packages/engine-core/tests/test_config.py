"""The configuration travels as plain data and refuses what contradicts itself."""

from __future__ import annotations

import json
import re
from dataclasses import FrozenInstanceError
from typing import Any

import msgpack
import pytest

from llmstack_engine_core import EngineConfig, SchedulerConfig, SpeculativeConfig
from llmstack_types import ModelRunnerConfig

CONFIG = EngineConfig(
    ModelRunnerConfig("model", max_model_len=64, max_num_drafts=3),
    runner="echo",
    scheduler=SchedulerConfig(max_model_len=64, policy="priority", speculative=SpeculativeConfig("ngram", 3)),
    num_blocks=12,
    is_max_model_len_explicit=True,
    log_level="DEBUG",
)


def test_a_configuration_survives_msgpack_and_json() -> None:
    for copy in (msgpack.unpackb(msgpack.packb(CONFIG.to_plain())), json.loads(json.dumps(CONFIG.to_plain()))):
        assert EngineConfig.from_plain(copy) == CONFIG


def test_missing_optional_fields_get_their_defaults() -> None:
    assert EngineConfig.from_plain({"model": {"model_path": "m"}}) == EngineConfig(ModelRunnerConfig("m"))


@pytest.mark.parametrize(
    ("data", "part"),
    [
        ([], "must be a mapping"),
        ({}, "needs the field 'model'"),
        ({"model": {}}, "needs the field 'model_path'"),
        ({"model": {"model_path": 1}}, "model.model_path must be str, but is int"),
        ({"model": {"model_path": "m", "seed": True}}, "model.seed must be int"),
        ({"model": {"model_path": "m"}, "num_blocks": "1"}, "num_blocks must be int or null"),
        ({"model": {"model_path": "m"}, "code": "x"}, "has no field 'code'"),
        ({"model": "m"}, "must be a mapping"),
        ({"model": {"model_path": "m"}, "scheduler": {"speculative": 1}}, "scheduler.speculative. must be a mapping"),
        ({"model": {"model_path": "m"}, "scheduler": {"speculative": {"depth": 1}}}, "has no field 'depth'"),
    ],
)
def test_malformed_data_is_refused_by_field(data: Any, part: str) -> None:
    with pytest.raises(ValueError, match=re.escape(part)):
        EngineConfig.from_plain(data)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_blocks": 0},
        {"kv_cache_bytes": -1},
        {"snapshot_steps": -1},
        {"snapshot_steps": 63},
        {"num_blocks": 1, "kv_cache_bytes": 1},
        {"max_num_queued_requests": 0},
        {"start_timeout_s": 0.0},
        {"log_level": "LOUD"},
        {"scheduler": SchedulerConfig(max_model_len=63)},
    ],
)
def test_values_that_make_no_sense_are_refused_by_name(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(changes))):
        EngineConfig(ModelRunnerConfig("m"), **changes)


def test_a_configuration_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        CONFIG.num_blocks = 1  # type: ignore[misc]


def test_drafts_need_a_runner_that_knows_of_them_and_tokens_that_are_known() -> None:
    drafts = SchedulerConfig(speculative=SpeculativeConfig("ngram", 2))
    with pytest.raises(ValueError, match="max_num_drafts"):
        EngineConfig(ModelRunnerConfig("m", max_num_drafts=1), scheduler=drafts)
    with pytest.raises(ValueError, match="async_scheduling"):
        EngineConfig(ModelRunnerConfig("m", max_num_drafts=2), scheduler=drafts, async_scheduling=True)


def test_cuda_graph_sizes_travel_as_a_list() -> None:
    plain = EngineConfig(ModelRunnerConfig("m", cuda_graph_sizes=(1, 8), kv_cache_dtype="fp8")).to_plain()
    assert plain["model"]["cuda_graph_sizes"] == [1, 8]
    assert EngineConfig.from_plain(plain).model.cuda_graph_sizes == (1, 8)
