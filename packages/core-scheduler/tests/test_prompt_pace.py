"""Steps with prompts beside running streams, on a clock that the tests turn by a step's work."""

import copy
import random

import pytest
from core_scheduler_helpers.machine import Machine

from llmstack_core_scheduler import SchedulerConfig
from llmstack_core_scheduler.prompt_pace import LEAST_NUM_TOKENS, LONG_NUM_STEPS
from llmstack_core_scheduler.snapshot import restore_snapshot, take_snapshot


def test_a_prompt_without_running_streams_is_not_cut():
    machine = Machine(max_itl_steps=3.0)
    machine.add("a", 1500)
    machine.add("b", 300)
    assert machine.step()[0] == {"a": 1500, "b": 300}


def test_before_anything_is_measured_a_prompt_is_cut_by_the_costs_of_a_usual_model():
    machine = Machine(max_itl_ms=1.0)
    machine.add("a", 4)
    machine.step()
    machine.add("b", 1000)
    assert LEAST_NUM_TOKENS < machine.step()[0]["b"] < 30


def test_sixteen_steps_teach_what_a_prompt_costs():
    machine = Machine(base_s=0.01, prompt_s=0.01, decode_s=0.01, pair_s=0.0, max_itl_steps=3.0)
    for number in range(4):
        machine.add(f"stream-{number}", 5, 4000)
        machine.step()
    for _ in range(13):
        machine.step()
    machine.add("long", 600, 2)
    rows, seconds, streams_s = machine.step()
    assert rows["long"] >= LEAST_NUM_TOKENS
    assert seconds <= 3.01 * streams_s


@pytest.mark.parametrize("limit", [{"max_itl_steps": 3.0}, {"max_itl_ms": 60.0}])
@pytest.mark.parametrize("seed", range(6))
def test_no_step_with_a_prompt_takes_longer_than_the_limit(limit, seed):
    rng = random.Random(seed)
    costs = rng.uniform(0.005, 0.02), rng.uniform(0.0005, 0.004), rng.uniform(0.0002, 0.002), rng.choice([0.0, 1e-7])
    machine = Machine(*costs, **limit)
    machine.learn()
    for number in range(rng.randint(1, 12)):
        machine.add(f"stream-{number}", 5, 4000)
        machine.step()
    machine.add("long", 600, 2)
    parts = []
    while sum(parts) < 300:
        rows, seconds, streams_s = machine.step()
        target_s = 0.06 if "max_itl_ms" in limit else 3.0 * streams_s
        assert rows["long"] <= LEAST_NUM_TOKENS or seconds <= 1.01 * target_s
        parts.append(rows["long"])


@pytest.mark.parametrize(("base_s", "num_steps"), [(0.001, 3.0), (0.025, 3.6), (0.2, 5.0)])
def test_a_step_takes_three_of_the_streams_or_what_makes_its_own_cost_a_seventh_within_the_limit(base_s, num_steps):
    machine = Machine(base_s=base_s, decode_s=0.004, pair_s=0.0, max_itl_steps=5.0)
    machine.learn()
    for number in range(8):
        machine.add(f"stream-{number}", 5, 4000)
        machine.step()
    machine.add("long", 2000, 2)
    while machine.step()[0].get("long", 0) == 0:
        pass
    _, seconds, streams_s = machine.step()
    assert 0.85 * num_steps <= seconds / streams_s <= 1.01 * num_steps


def test_a_long_prompt_leaves_time_to_short_ones_behind_it():
    machine = Machine(max_itl_steps=3.0, prompt_s=0.0005)
    machine.learn()
    machine.add("stream", 10, 4000)
    machine.step()
    machine.add("long", 4000, 2)
    alone = machine.step()[0]["long"]
    machine.add("short", 30, 2)
    rows = machine.step()[0]
    assert alone * LONG_NUM_STEPS < 4000
    assert 0.4 * alone <= rows["long"] <= 0.6 * alone
    assert rows["short"] >= LEAST_NUM_TOKENS


def test_parts_of_a_prompt_are_equal():
    machine = Machine(max_itl_steps=3.0, pair_s=0.0)
    machine.learn()
    machine.add("stream", 10, 4000)
    machine.step()
    machine.add("a", 100, 2)
    parts = []
    while (rows := machine.step()[0]).get("a", 0) > 1:
        parts.append(rows["a"])
    assert sum(parts) == 100
    assert len(parts) > 2
    assert max(parts) - min(parts) <= 2


def test_without_a_limit_nothing_is_cut_and_nothing_measured():
    machine = Machine()
    machine.add("stream", 10)
    machine.step()
    machine.add("a", 1500)
    assert machine.step()[0]["a"] == 1500
    assert take_snapshot(machine.scheduler)[0]["pace"] == []


def test_a_restored_scheduler_cuts_prompts_as_the_one_before_it():
    machine, rng = Machine(max_itl_steps=3.0), random.Random(3)
    for number in range(30):
        machine.add(str(number), rng.randint(1, 300), rng.randint(1, 20))
        for _ in range(2):
            machine.step()
        restored = Machine(max_itl_steps=3.0)
        manager = restored.scheduler._kv_cache_manager
        manager.__dict__.update(copy.deepcopy(machine.scheduler.kv_cache_manager.__dict__))
        restore_snapshot(restored.scheduler, *take_snapshot(machine.scheduler))
        restored.now_s = machine.now_s
        ahead = copy.deepcopy(machine)
        for _ in range(6):
            assert restored.step() == ahead.step()
        assert take_snapshot(restored.scheduler) == take_snapshot(ahead.scheduler)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"max_itl_ms": -1.0}, "max_itl_ms must be 0 or a number above 0, got -1.0"),
        ({"max_itl_ms": float("nan")}, "max_itl_ms must be 0 or a number above 0, got nan"),
        ({"max_itl_steps": 1.0}, "max_itl_steps must be 0 or a number above 1, got 1.0"),
        ({"max_itl_ms": 1.0, "max_itl_steps": 2.0}, "exclude each other"),
        ({"max_itl_ms": 1.0, "pipeline_parallel_size": 2}, "needs one stage"),
        ({"max_itl_ms": 1.0, "enable_chunked_prefill": False}, "needs enable_chunked_prefill"),
    ],
)
def test_a_limit_that_cannot_hold_is_refused(changes, text):
    with pytest.raises(ValueError, match=text):
        SchedulerConfig(**changes)
