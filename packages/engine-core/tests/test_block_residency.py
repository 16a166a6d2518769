"""How long blocks keep what they hold, from the tables of steps alone."""

from __future__ import annotations

import pytest

from llmstack_engine_core import EngineConfig, build_engine_core
from llmstack_engine_core.block_residency import MAX_REUSE_GAPS, BlockResidency
from llmstack_types import (
    BlockEviction,
    EngineCoreRequest,
    ModelRunnerConfig,
    NewRequest,
    SamplingParams,
    ScheduledRequest,
    SchedulerOutput,
)


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def step(row: ScheduledRequest, *, is_new: bool = True, **copies: list[tuple[int, int]]) -> SchedulerOutput:
    introduced = [NewRequest(row.request_id, [1], 1, SamplingParams())] if is_new else []
    return SchedulerOutput(1, introduced, [row], **copies)


def test_a_block_that_is_allocated_again_has_lost_its_content() -> None:
    clock = Clock()
    residency = BlockResidency(4, 1.0, clock)
    residency.on_scheduled(step(ScheduledRequest("a", 0, 8, [0, 1])))
    clock.now_s = 5.0
    residency.on_scheduled(step(ScheduledRequest("b", 0, 4, [1])))
    assert residency.take() == (BlockEviction(5.0, 5.0),)
    assert residency.take() == ()


def test_a_prefix_that_is_found_is_used_again() -> None:
    clock = Clock()
    residency = BlockResidency(4, 1.0, clock)
    residency.on_scheduled(step(ScheduledRequest("a", 0, 8, [0, 1])))
    clock.now_s = 2.0
    residency.on_scheduled(step(ScheduledRequest("b", 4, 4, [0, 2])))  # block 0 is found, block 2 is new
    clock.now_s = 9.0
    residency.on_scheduled(step(ScheduledRequest("c", 0, 4, [0])))
    assert residency.take() == (BlockEviction(9.0, 7.0, (2.0,)),)


def test_the_blocks_that_a_running_request_gets_are_new_whatever_it_has_computed() -> None:
    clock = Clock()
    residency = BlockResidency(4, 1.0, clock)
    residency.on_scheduled(step(ScheduledRequest("a", 0, 4, [0])))
    clock.now_s = 1.0
    residency.on_scheduled(step(ScheduledRequest("b", 8, 1, [0]), is_new=False))
    assert len(residency.take()) == 1


@pytest.mark.parametrize("copies", [{"swap_ins": [(7, 0)]}, {"block_copies": [(7, 0)]}])
def test_a_block_that_is_copied_into_is_new(copies: dict[str, list[tuple[int, int]]]) -> None:
    clock = Clock()
    residency = BlockResidency(4, 1.0, clock)
    residency.on_scheduled(step(ScheduledRequest("a", 0, 4, [0])))
    residency.on_scheduled(step(ScheduledRequest("b", 4, 1, [0]), **copies))
    assert len(residency.take()) == 1


def test_few_gaps_are_kept_and_a_sample_of_blocks_is_followed() -> None:
    clock = Clock()
    residency = BlockResidency(1, 0.5, clock)
    for number in range(MAX_REUSE_GAPS + 4):
        clock.now_s = float(number)
        residency.on_scheduled(step(ScheduledRequest(f"r{number}", 2 if number else 0, 1, [2, 3])))
    residency.on_scheduled(step(ScheduledRequest("last", 0, 2, [2, 3])))
    (eviction,) = residency.take()  # of block 2; block 3 is not in the sample
    assert eviction.reuse_gaps_s == (1.0,) * MAX_REUSE_GAPS


def test_the_engine_core_tells_of_evictions_where_they_are_measured() -> None:
    reported = {}
    for sample in (0.0, 1.0):
        config = EngineConfig(
            ModelRunnerConfig("echo"),
            runner="echo",
            num_blocks=4,
            block_metrics_sample=sample,
            enable_prefix_caching=False,
        )
        engine, evictions = build_engine_core(config), []
        for number in range(3):
            engine.add_request(EngineCoreRequest(f"r{number}", [1] * 40, SamplingParams(max_tokens=1, seed=0)))
            outputs = engine.step()
            while not outputs.outputs:
                outputs = engine.step()
            evictions += outputs.evictions
        reported[sample] = evictions
    assert reported[0.0] == []
    assert len(reported[1.0]) > 0
    assert all(eviction.lifetime_s >= eviction.idle_s >= 0 for eviction in reported[1.0])
