"""Which models are in memory: loads, evictions, sleep, failures, and who pays."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from server_helpers.waiting import Clock

from llmstack_server.options.models_file import ModelEntry, ModelsFile
from llmstack_server.pool import model_pool
from llmstack_server.pool.model_pool import MIN_STAY_S, ModelPool
from llmstack_server.pool.pooled_model import MemoryPlan, ModelStatus, PooledModel
from llmstack_server.state.idle_sleep import IdleSleep
from llmstack_server.testing import FakeEngineClient, ready_state
from llmstack_server.web.errors import HTTPError
from llmstack_types import EngineDeadError, EngineStartError

GIB = 1 << 30


class Host:
    """A host whose engine is a fake one; it starts when `may_start` is set."""

    app: Any = None
    routes: Any = ()
    adapters: Any = ()

    def __init__(self, log: list[str], name: str) -> None:
        self.log, self.name = log, name
        self.state = ready_state(FakeEngineClient())
        self.state.opened_engine = None
        self.may_start = asyncio.Event()
        self.may_start.set()
        self.error: Exception | None = None
        self.num_starting = self.num_ended = 0
        self.may_stop = asyncio.Event()
        self.may_stop.set()

    async def start(self) -> None:
        self.log.append(f"+{self.name}")
        await self.may_start.wait()
        if self.error is not None:
            raise self.error
        self.state.opened_engine = FakeEngineClient()

    async def stop(self) -> None:
        self.log.append(f"-{self.name}")
        self.state.opened_engine = None
        await asyncio.sleep(0)
        await self.may_stop.wait()
        self.num_ended += 1

    async def check(self) -> None:
        await self.state.engine.check_health()


class Bench:
    """A pool of models of 4 GiB each, of which two fit."""

    def __init__(self, names: str = "abc", *, loads_per_minute: int = 100, idle_sleep_s: float | None = None) -> None:
        self.clock, self.log = Clock(), list[str]()
        self.models: dict[str, PooledModel] = {}
        for name in names:
            entry = ModelEntry(name, name, 4 * GIB, idle_sleep_s, 2, (), {})
            host = Host(self.log, name)
            if idle_sleep_s is not None:
                host.state.idle = IdleSleep(lambda host=host: host.state.opened_engine, idle_sleep_s, 2, self.clock)
            self.models[name] = PooledModel(entry, MemoryPlan(GIB, 2 * GIB, GIB), host, self.clock)
        file = ModelsFile(9 * GIB, loads_per_minute, 30.0, ())
        self.pool = ModelPool(file, list(self.models.values()), self.clock)

    async def use(self, name: str, tenant: str = "t") -> None:
        model = self.models[name]
        with model.used():
            await self.pool.wait_until_loaded(model, tenant)
        self.clock.now_s += 1

    def host(self, name: str) -> Host:
        host = self.models[name].host
        assert isinstance(host, Host)
        return host

    def statuses(self) -> str:
        return " ".join(str(model.status) for model in self.models.values())


async def let_run() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(model_pool, "POLL_S", 0.0)
    return


async def test_models_are_loaded_when_they_are_asked_for_and_the_longest_unused_makes_room():
    bench = Bench()
    await bench.use("a")
    await bench.use("b")
    assert (bench.log, bench.statuses()) == (["+a", "+b"], "loaded loaded unloaded")
    bench.clock.now_s += MIN_STAY_S
    await bench.use("a")
    await bench.use("c")
    assert (bench.log, bench.statuses()) == (["+a", "+b", "-b", "+c"], "loaded unloaded loaded")
    assert bench.pool.charged_bytes == 8 * GIB
    assert bench.models["b"].num_evictions == 1


async def test_a_model_stays_a_minute_and_one_in_use_for_as_long_as_it_is_used():
    bench = Bench()
    await bench.use("a")  # a second before b
    await bench.use("b")
    bench.clock.now_s += MIN_STAY_S - 3
    loading = asyncio.create_task(bench.use("c"))
    await let_run()
    assert bench.log == ["+a", "+b"]
    with bench.models["a"].used():
        bench.clock.now_s += 1  # a minute of a, which is used
        await let_run()
        assert bench.log == ["+a", "+b"]
        bench.clock.now_s += 1
        await loading
    assert bench.log == ["+a", "+b", "-b", "+c"]


async def test_a_load_without_room_ends_in_time_or_with_its_last_request():
    bench = Bench()
    await bench.use("a")
    await bench.use("b")
    with bench.models["a"].used(), bench.models["b"].used():
        bench.clock.now_s += MIN_STAY_S
        loading = asyncio.create_task(bench.use("c"))
        await let_run()
        assert not loading.done()
        bench.clock.now_s += 30
        with pytest.raises(HTTPError, match="no room") as caught:
            await loading
        assert (caught.value.answer.status, caught.value.answer.headers["retry-after"]) == (503, "30")
        loading = asyncio.create_task(bench.use("c"))
        await let_run()
        loading.cancel()
        await let_run()
        assert bench.models["c"].loading is None
    assert bench.statuses() == "loaded loaded unloaded"


async def test_requests_of_one_model_share_a_load_and_engines_start_one_at_a_time():
    bench = Bench()
    bench.host("a").may_start.clear()
    waiting = [asyncio.create_task(bench.use(name)) for name in "aabaa"]
    await let_run()
    assert (bench.log, bench.statuses()) == (["+a"], "loading loading unloaded")
    bench.host("a").may_start.set()
    await asyncio.gather(*waiting)
    assert bench.log == ["+a", "+b"]


async def test_loads_are_charged_to_the_key_that_causes_them():
    bench = Bench("ab", loads_per_minute=2)
    for name in "ab":
        await bench.use(name, "greedy")
        await bench.pool._unload(bench.models[name])
    with pytest.raises(HTTPError) as caught:
        await bench.use("a", "greedy")
    answer = caught.value.answer
    assert (answer.status, answer.code, "retry-after" in answer.headers) == (429, "rate_limit_exceeded", True)
    await bench.use("a", "other")
    await bench.use("a", "greedy")  # it is there, so nothing is charged
    bench.clock.now_s += 30
    await bench.use("b", "greedy")


async def test_a_model_that_cannot_be_loaded_is_tried_again_later_and_touches_no_other():
    bench = Bench()
    await bench.use("b")
    for error in (EngineStartError("no memory"), ValueError("a bug")):
        bench.host("a").error = error
        with pytest.raises(HTTPError, match="could not be loaded") as caught:
            await bench.use("a")
        assert caught.value.answer.status == 503
        num_tries = len(bench.log)
        with pytest.raises(HTTPError):  # at once, without another try
            await bench.use("a")
        assert len(bench.log) == num_tries
        assert bench.statuses() == "failed loaded unloaded"
        assert bench.pool.charged_bytes == 4 * GIB
        bench.clock.now_s += 60
    bench.host("a").error = None
    await bench.use("a")
    assert bench.statuses() == "loaded loaded unloaded"


async def test_an_engine_that_dies_is_unloaded_and_the_others_stay():
    bench = Bench()
    await bench.use("a")
    await bench.use("b")
    engine: Any = bench.host("a").state.opened_engine
    engine.is_dead = True
    await bench.pool.tick()
    assert bench.statuses() == "failed loaded unloaded"
    assert bench.pool.charged_bytes == 4 * GIB
    with pytest.raises(HTTPError):
        await bench.use("a")
    bench.clock.now_s += 10
    await bench.use("a")
    assert bench.statuses() == "loaded loaded unloaded"


async def test_a_sleeping_model_counts_with_what_it_keeps_and_makes_room_before_it_wakes():
    bench = Bench(idle_sleep_s=10.0)
    for name in "ab":
        await bench.use(name)
    idle_a = bench.models["a"].host.state.idle
    assert idle_a is not None
    bench.clock.now_s += 10
    idle_a.tick()
    await let_run()
    assert (bench.statuses(), bench.pool.charged_bytes) == ("sleeping loaded unloaded", 5 * GIB)
    await bench.use("c")
    assert bench.statuses() == "sleeping loaded loaded"
    bench.clock.now_s += MIN_STAY_S
    with bench.models["a"].used():
        await bench.pool.wait_until_awake(bench.models["a"], "t")
    assert bench.statuses() == "loaded unloaded loaded"
    assert bench.pool.charged_bytes == 8 * GIB


@pytest.mark.parametrize("other", ["", "c"])
async def test_a_sleeping_engine_core_that_was_restarted_counts_with_all_it_has(other: str):
    bench = Bench(idle_sleep_s=10.0)
    for name in "ab":
        await bench.use(name)
    model = bench.models["a"]
    idle = model.host.state.idle
    assert idle is not None
    bench.clock.now_s += 10
    idle.tick()
    await let_run()
    if other:
        await bench.use(other)  # in the memory of the one that sleeps
    await model.host.state.engine.wake_up()  # another one in its place
    idle.tick()
    await bench.pool.tick()
    assert bench.statuses() == ("unloaded loaded loaded" if other else "loaded loaded unloaded")
    assert bench.pool.charged_bytes == 8 * GIB


async def test_a_key_without_loads_wakes_nothing_and_keeps_no_other_from_it():
    bench = Bench(idle_sleep_s=10.0, loads_per_minute=1)
    model = bench.models["a"]
    idle = model.host.state.idle
    assert idle is not None
    await bench.use("a", "greedy")
    bench.clock.now_s += 10
    idle.tick()
    await let_run()
    for name in "bc":
        await bench.use(name, f"of {name}")
    with model.used(), bench.models["b"].used():
        bench.clock.now_s += 1  # not enough for a share of `greedy`
        await bench.use("a", "nobody")  # it is there: asleep
        waking = [asyncio.create_task(bench.pool.wait_until_awake(model, name)) for name in ("greedy", "of b", "d")]
        await let_run()
        bench.clock.now_s += MIN_STAY_S
        found = await asyncio.gather(*waking, return_exceptions=True)
    assert [getattr(getattr(one, "answer", None), "status", None) for one in found] == [429, 429, None]
    assert bench.statuses() == "loaded loaded unloaded"


async def test_no_request_comes_to_a_model_that_is_about_to_be_evicted():
    bench = Bench()
    for name in "ab":
        await bench.use(name)
    bench.clock.now_s += MIN_STAY_S
    model = bench.models["a"]
    loading = asyncio.create_task(bench.use("c"))
    while model.is_loaded:
        engine = model.host.state.opened_engine
        await asyncio.sleep(0)
    assert model.host.state.opened_engine is engine  # refused first, ended then
    await loading


async def test_no_more_models_than_needed_make_room():
    bench = Bench("abcd")
    bench.models["a"].entry = bench.models["a"].entry._replace(memory_bytes=GIB)
    for name in "ab":
        await bench.use(name)
    bench.models["c"].entry = bench.models["c"].entry._replace(memory_bytes=8 * GIB)
    bench.clock.now_s += MIN_STAY_S
    await bench.use("d")
    bench.clock.now_s += MIN_STAY_S
    assert bench.log == ["+a", "+b", "+d"]
    await bench.use("c")
    assert bench.log == ["+a", "+b", "+d", "-b", "-d", "+c"]  # a, unused for longest, is too small to matter


async def test_the_end_of_the_server_ends_all_engines_and_loads():
    bench = Bench()
    await bench.use("a")
    bench.host("b").may_start.clear()
    loading = asyncio.create_task(bench.use("b"))
    await let_run()
    await bench.pool.shutdown()
    await asyncio.gather(loading, return_exceptions=True)
    assert loading.cancelled()
    assert bench.models["a"].status is ModelStatus.UNLOADED
    with pytest.raises(HTTPError):
        await bench.use("a")


async def test_the_end_of_the_server_waits_for_an_engine_that_makes_room():
    bench = Bench()
    for name in "ab":
        await bench.use(name)
    bench.clock.now_s += MIN_STAY_S
    host = bench.host("a")
    host.may_stop.clear()
    loading = asyncio.create_task(bench.use("c"))
    await let_run()
    assert bench.log == ["+a", "+b", "-a"]
    ending = asyncio.create_task(bench.pool.shutdown())
    await let_run()
    assert not ending.done()  # what it has computed may still be on its way to the disk
    host.may_stop.set()
    await ending
    await asyncio.gather(loading, return_exceptions=True)
    assert (host.num_ended, bench.host("b").num_ended, bench.pool.charged_bytes) == (1, 1, 0)


async def test_a_signal_while_a_dead_engine_is_cleared_away_leaves_nothing_of_it():
    bench = Bench()
    await bench.use("a")
    host = bench.host("a")
    engine: Any = host.state.opened_engine
    engine.is_dead = True
    host.may_stop.clear()
    watching = asyncio.create_task(bench.pool.tick())
    await let_run()
    watching.cancel()
    ending = asyncio.create_task(bench.pool.shutdown())
    await let_run()
    assert not ending.done()
    host.may_stop.set()
    await ending
    assert (host.num_ended, bench.models["a"].status) == (1, ModelStatus.FAILED)


async def test_a_dead_engine_is_seen_only_where_it_is():
    bench = Bench()
    await bench.use("a")
    host = bench.host("b")
    with pytest.raises(EngineDeadError):
        await host.check()
    await bench.pool.tick()  # b is not loaded
    assert bench.statuses() == "loaded unloaded unloaded"


async def test_models_with_answers_of_an_earlier_server_are_loaded_at_no_keys_cost():
    bench = Bench("ab", loads_per_minute=1)
    for model in bench.models.values():
        model.host.state.num_left_answers = 1
    bench.pool.load_left()
    await let_run()
    assert bench.log == ["+a", "+b"]
    await bench.pool._unload(bench.models["a"])
    await bench.use("a", "")  # of a server without keys
