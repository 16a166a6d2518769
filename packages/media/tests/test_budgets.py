"""Shares of a bounded amount: limits always hold, no key is starved, and what is held is given back."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest

from llmstack_media.budgets import FairBudget
from llmstack_types import ServerOverloadedError


@pytest.mark.parametrize("seed", range(20))
async def test_limits_hold_and_all_end_whatever_is_cancelled(seed: int) -> None:
    rng = random.Random(seed)
    budget = FairBudget(10, 6)
    held: Counter[str] = Counter()

    async def work(tenant: str, amount: int) -> None:
        async with budget.hold(tenant, amount):
            held[tenant] += min(amount, 6)
            assert held.total() <= budget.held <= 10
            assert held[tenant] <= 6
            try:
                for _ in range(rng.randrange(4)):
                    await asyncio.sleep(0)
            finally:
                held[tenant] -= min(amount, 6)

    tasks = [asyncio.create_task(work(rng.choice("abc"), rng.randrange(1, 9))) for _ in range(60)]
    for _ in range(30):
        await asyncio.sleep(0)
        rng.choice(tasks).cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert all(task.cancelled() or task.exception() is None for task in tasks)
    assert budget.held == budget.num_waiting == 0


async def test_a_key_that_holds_less_is_next() -> None:
    budget, order, let_go = FairBudget(2, 2), [], asyncio.Event()

    async def work(name: str, tenant: str) -> None:
        async with budget.hold(tenant, 1):
            order.append(name)
            await let_go.wait()

    tasks = [asyncio.create_task(work(f"a{number}", "a")) for number in range(4)]
    await asyncio.sleep(0)
    tasks.append(asyncio.create_task(work("b", "b")))
    await asyncio.sleep(0)
    assert order == ["a0", "a1"]
    tasks[0].cancel()
    for _ in range(5):
        await asyncio.sleep(0)
    assert order == ["a0", "a1", "b"]
    let_go.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert order == ["a0", "a1", "b", "a2", "a3"]


async def test_waiting_places_are_bounded_and_one_key_leaves_some() -> None:
    budget = FairBudget(1, 1, max_waiting=8)
    async with budget.hold("a", 1):
        waiting = [asyncio.create_task(budget.hold("a", 1).__aenter__()) for _ in range(6)]
        await asyncio.sleep(0)
        assert [task.done() for task in waiting] == [False] * 4 + [True] * 2
        assert all(isinstance(task.exception(), ServerOverloadedError) for task in waiting[4:])
        other = asyncio.create_task(budget.hold("b", 1).__aenter__())
        await asyncio.sleep(0)
        assert not other.done()
        for task in (*waiting, other):
            task.cancel()
    await asyncio.gather(*waiting, other, return_exceptions=True)
    assert budget.held == budget.num_waiting == 0
