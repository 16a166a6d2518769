"""Sleep of an engine that nothing uses: when it begins, who may end it, and what waits for that."""

from __future__ import annotations

import asyncio

import pytest

from llmstack_server.state.idle_sleep import IdleSleep
from llmstack_types import EngineDeadError


class Engine:
    """An engine whose sleep and wake take until `may_go_on` is set."""

    def __init__(self) -> None:
        self.sleep_level = 0
        self.running_request_ids: list[str] = []
        self.may_go_on = asyncio.Event()
        self.may_go_on.set()
        self.num_wakes = 0
        self.is_dead = False

    async def sleep(self, level: int = 1) -> bool:
        await self.may_go_on.wait()
        if not self.running_request_ids:
            self.sleep_level = level
        return not self.running_request_ids

    async def wake_up(self) -> None:
        await self.may_go_on.wait()
        if self.is_dead:
            raise EngineDeadError("gone")
        self.num_wakes += 1
        self.sleep_level = 0


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
async def parts() -> tuple[IdleSleep, Engine, Clock]:
    engine, clock = Engine(), Clock()
    return IdleSleep(lambda: engine, 10.0, 2, clock), engine, clock


async def pass_time(idle: IdleSleep, clock: Clock, seconds: float) -> None:
    clock.now_s += seconds
    idle.tick()
    for _ in range(5):
        await asyncio.sleep(0)


async def test_an_engine_falls_asleep_after_its_time_and_wakes_once_for_all(parts):
    idle, engine, clock = parts
    await pass_time(idle, clock, 9.9)
    assert (idle.is_asleep, engine.sleep_level) == (False, 0)
    await pass_time(idle, clock, 0.1)
    assert (idle.is_asleep, engine.sleep_level, idle.num_sleeps) == (True, 2, 1)
    await asyncio.gather(*(idle.wake() for _ in range(5)))
    assert (idle.is_asleep, engine.sleep_level, engine.num_wakes, idle.num_wakes) == (False, 0, 1, 1)
    await pass_time(idle, clock, 9.9)  # the time begins again
    assert not idle.is_asleep


async def test_an_engine_in_use_stays_awake(parts):
    idle, engine, clock = parts
    with idle.used():
        await pass_time(idle, clock, 100)
    await pass_time(idle, clock, 9)
    engine.running_request_ids = ["kept without its connection"]
    await pass_time(idle, clock, 100)
    engine.running_request_ids = []
    await pass_time(idle, clock, 9)
    assert not idle.is_asleep
    await pass_time(idle, clock, 1)
    assert idle.is_asleep


async def test_a_request_that_comes_while_the_engine_falls_asleep_waits_for_both(parts):
    idle, engine, clock = parts
    engine.may_go_on.clear()
    await pass_time(idle, clock, 10)
    assert (idle.is_asleep, engine.sleep_level) == (True, 0)
    waiting = asyncio.create_task(idle.wake())
    await asyncio.sleep(0)
    engine.may_go_on.set()
    await waiting
    assert (idle.is_asleep, engine.sleep_level, idle.num_sleeps, idle.num_wakes) == (False, 0, 1, 1)


async def test_one_waiter_that_leaves_is_not_all_of_them(parts):
    idle, engine, clock = parts
    await pass_time(idle, clock, 10)
    engine.may_go_on.clear()
    first, second = (asyncio.create_task(idle.wake()) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    engine.may_go_on.set()
    await second
    assert not idle.is_asleep


async def test_what_an_operator_says_holds(parts):
    idle, engine, clock = parts
    engine.sleep_level = 1
    await pass_time(idle, clock, 100)
    assert (idle.is_asleep, idle.num_sleeps) == (False, 0)
    engine.sleep_level = 0
    await pass_time(idle, clock, 10)
    assert idle.is_asleep
    idle.note_use()  # the operator has put it to sleep as well
    await idle.wake()
    assert (engine.sleep_level, engine.num_wakes) == (2, 0)


async def test_an_engine_core_in_the_place_of_one_that_died_asleep_is_awake(parts):
    idle, engine, clock = parts
    await pass_time(idle, clock, 10)
    engine.sleep_level = 0
    await pass_time(idle, clock, 1)
    assert not idle.is_asleep
    await pass_time(idle, clock, 10)
    assert idle.is_asleep


async def test_an_engine_with_a_late_request_does_not_sleep(parts):
    idle, engine, clock = parts
    engine.may_go_on.clear()
    await pass_time(idle, clock, 10)
    engine.running_request_ids = ["late"]
    engine.may_go_on.set()
    await pass_time(idle, clock, 0)
    assert (idle.is_asleep, engine.sleep_level) == (False, 0)


async def test_an_engine_that_cannot_wake_says_so_to_each_request(parts):
    idle, engine, clock = parts
    await pass_time(idle, clock, 10)
    engine.is_dead = True
    for _ in range(2):
        with pytest.raises(EngineDeadError):
            await idle.wake()


async def test_an_engine_sleeps_only_where_a_time_is_given():
    engine, clock = Engine(), Clock()
    idle = IdleSleep(lambda: engine, None, 1, clock)
    await pass_time(idle, clock, 1e9)
    assert not idle.is_asleep
    await pass_time(IdleSleep(lambda: None, 1, 1, clock), clock, 1e9)  # and only where there is one
