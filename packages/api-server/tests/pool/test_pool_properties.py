"""What holds for a pool of models whatever comes: the bound of memory, and that nothing in use is evicted."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from server_helpers.waiting import Clock

from llmstack_server.options.models_file import ModelEntry, ModelsFile
from llmstack_server.pool import model_pool
from llmstack_server.pool.model_pool import MIN_STAY_S, ModelPool
from llmstack_server.pool.pooled_model import MemoryPlan, PooledModel
from llmstack_server.state.idle_sleep import IdleSleep
from llmstack_server.testing import FakeEngineClient, ready_state
from llmstack_types import EngineStartError

LIMIT = 10
SIZES = (3, 4, 5, 6)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.integers(0, 3), st.sampled_from(["t", "u"])),
        st.tuples(st.just("ask"), st.integers(0, 3), st.sampled_from(["t", "u"])),
        st.tuples(st.just("end"), st.integers(0, 9), st.none()),
        st.tuples(st.just("pass"), st.sampled_from([1, 10, 59, 61]), st.none()),
        st.tuples(st.just("kill"), st.integers(0, 3), st.none()),
        st.tuples(st.just("break"), st.integers(0, 3), st.booleans()),
        st.tuples(st.just("leave"), st.integers(0, 9), st.none()),
    ),
    min_size=10,
    max_size=60,
)


class Host:
    """A host that checks that its engine ends only when it may."""

    app: Any = None
    routes: Any = ()
    adapters: Any = ()

    def __init__(self, pool: World, index: int) -> None:
        self.world, self.index = pool, index
        self.state = ready_state(FakeEngineClient())
        self.state.opened_engine = None
        self.state.idle = IdleSleep(lambda: self.state.opened_engine, 30.0, 1 + index % 2, pool.clock)
        self.is_broken = False
        self.num_running = 0

    async def start(self) -> None:
        self.world.num_starting += 1
        self.world.check(self.state.opened_engine is None, "it has an engine already")
        self.world.check(self.world.num_starting == 1, "two engines start at one time")
        for _ in range(20):  # longer than a step, so that loads and other things are at one time
            await asyncio.sleep(0)
        self.world.num_starting -= 1
        if self.is_broken:
            raise EngineStartError("broken")
        self.state.opened_engine = FakeEngineClient()

    async def stop(self) -> None:
        engine: Any = self.state.opened_engine
        model = self.world.models[self.index]
        if not engine.is_dead:
            self.world.check(not model.is_used, "a model in use is evicted")
            self.world.check(self.world.clock.now_s - model.since_s >= MIN_STAY_S, "a model stays less than a minute")
        self.state.opened_engine = None
        await asyncio.sleep(0)

    async def check(self) -> None:
        await self.state.engine.check_health()


class World:
    def __init__(self) -> None:
        self.clock, self.num_starting, self.faults = Clock(), 0, list[str]()
        hosts = [Host(self, index) for index in range(len(SIZES))]
        entries = [ModelEntry(str(index), "m", size, 30.0, 1 + index % 2, (), {}) for index, size in enumerate(SIZES)]
        self.models = [
            PooledModel(entry, MemoryPlan(1, 1, entry.memory_bytes - 2), host, self.clock)
            for entry, host in zip(entries, hosts, strict=True)
        ]
        self.pool = ModelPool(ModelsFile(LIMIT, 30, 200.0, ()), self.models, self.clock)
        self.requests: list[tuple[asyncio.Task[None], asyncio.Event]] = []

    def check(self, is_right: bool, fault: str) -> None:
        """Notes a fault: an error within a host would be a load that fails."""
        if not is_right:
            self.faults.append(fault)

    async def request(self, model: PooledModel, tenant: str, may_end: asyncio.Event) -> None:
        idle = model.host.state.idle
        assert idle is not None
        with ExitStack() as stack:
            stack.enter_context(model.used())
            stack.enter_context(idle.used(tenant))
            await self.pool.wait_until_awake(model, tenant)
            is_whole = model.charged_bytes == model.entry.memory_bytes
            self.check(is_whole or model.host.state.opened_engine is None, "an awake model counts with too little")
            await may_end.wait()

    async def step(self, kind: str, number: int, detail: Any) -> None:
        model = self.models[number % len(SIZES)]
        host: Any = model.host
        if kind == "ask":
            may_end = asyncio.Event()
            self.requests.append((asyncio.create_task(self.request(model, detail, may_end)), may_end))
        elif kind == "end" and self.requests:
            self.requests[number % len(self.requests)][1].set()
        elif kind == "leave" and self.requests:
            self.requests[number % len(self.requests)][0].cancel()
        elif kind == "pass":
            self.clock.now_s += number
        elif kind == "kill" and host.state.opened_engine is not None and model.is_loaded:
            host.state.opened_engine.is_dead = True
        elif kind == "break":
            host.is_broken = detail
        for one in self.models:
            idle = one.host.state.idle
            assert idle is not None
            idle.tick()
        await self.pool.tick()
        for _ in range(12):
            await asyncio.sleep(0)
            assert self.pool.charged_bytes <= LIMIT
        for one in self.models:
            if one.is_loaded and one.host.state.engine.sleep_level and one.host.state.idle.is_asleep:
                self.check(one.charged_bytes >= one.plan.asleep_bytes(one.host.state.idle.level), "sleep costs nothing")
        assert not self.faults

    async def run(self, steps: list[tuple[str, int, Any]]) -> None:
        for step in steps:
            await self.step(*step)
        for _, may_end in self.requests:
            may_end.set()
        for one in self.models:
            one.host.is_broken = False  # type: ignore[attr-defined]  # of the host above
        for _ in range(40):  # whatever has happened: once nothing is in use, every model can be loaded again
            await self.step("pass", 10, None)
        assert all(task.done() for task, _ in self.requests)
        await asyncio.gather(*(task for task, _ in self.requests), return_exceptions=True)
        for model in self.models:
            self.clock.now_s += 400
            await self.request(model, "v", _set_event())
            assert model.is_loaded
        self.clock.now_s += 400
        await self.pool.shutdown()


def _set_event() -> asyncio.Event:
    event = asyncio.Event()
    event.set()
    return event


@given(STEPS)
def test_the_bound_holds_and_nothing_in_use_is_evicted(steps: list[tuple[str, int, Any]]):
    poll_s, model_pool.POLL_S = model_pool.POLL_S, 0.0
    try:
        asyncio.run(World().run(steps))
    finally:
        model_pool.POLL_S = poll_s
