"""Turns: one at a time, the smaller first."""

from __future__ import annotations

import asyncio

import pytest

from llmstack_server.state.turns import Turns


class Work:
    """Work that lasts until the test ends it."""

    def __init__(self) -> None:
        self.turns = Turns()
        self.running: list[str] = []
        self.order: list[str] = []
        self._ends: dict[str, asyncio.Event] = {}

    async def begin(self, name: str, size: int) -> asyncio.Task[None]:
        self._ends[name] = asyncio.Event()
        task = asyncio.create_task(self._run(name, size))
        await self._settle()
        return task

    async def end(self, name: str) -> None:
        self._ends[name].set()
        await self._settle()

    async def _run(self, name: str, size: int) -> None:
        async with self.turns.turn(size):
            self.order.append(name)
            self.running.append(name)
            assert len(self.running) == 1
            try:
                await self._ends[name].wait()
            finally:
                self.running.remove(name)

    async def _settle(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)


async def test_smaller_work_overtakes_larger_but_not_for_ever():
    work = Work()
    await work.begin("first", 10)
    await work.begin("large", 100)
    for number in range(20):
        await work.begin(f"small{number}", 30)
        if work.running != ["large"]:
            await work.end(work.running[0])
    assert work.order[:2] == ["first", "small0"]
    assert 3 <= work.order.index("large") <= 6


@pytest.mark.parametrize("is_running", [True, False])
async def test_work_whose_caller_leaves_passes_its_turn_on(is_running: bool):
    work = Work()
    tasks = {name: await work.begin(name, 10) for name in ("a", "b", "c")}
    tasks["a" if is_running else "b"].cancel()
    await work.end("b" if is_running else "a")
    await work.end("c")
    assert work.order == (["a", "b", "c"] if is_running else ["a", "c"])
    assert work.running == []
    await work.begin("d", 1)
    assert work.running == ["d"]
    await work.end("d")


async def test_a_turn_that_comes_as_its_caller_leaves_is_passed_on():
    work = Work()
    await work.begin("a", 10)
    leaving = await work.begin("b", 10)
    staying = await work.begin("c", 20)
    work._ends["a"].set()
    for _ in range(5):
        await asyncio.sleep(0)
        if not work.running:
            break
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    await work.end("b")
    await work.end("c")
    await staying
    assert work.order[-1] == "c"
