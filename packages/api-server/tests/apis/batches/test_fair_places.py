"""Places of the requests of batches: keys take turns in them."""

from __future__ import annotations

import asyncio
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from llmstack_server.apis.batches.fair_places import FairPlaces

QUANTUM = 100


class Work:
    """Requests of keys, each of which takes a place for a turn of the loop."""

    def __init__(self, num_places: int) -> None:
        self.places = FairPlaces(num_places, QUANTUM)
        self.order: list[str] = []
        self.num_running = self.max_running = 0

    async def do(self, tenant: str, num_tokens: int) -> None:
        async with self.places.place(tenant) as place:
            self.order.append(tenant)
            self.num_running += 1
            self.max_running = max(self.max_running, self.num_running)
            await asyncio.sleep(0)
            place.num_tokens = num_tokens
            self.num_running -= 1

    async def do_all(self, requests: list[tuple[str, int]]) -> list[str]:
        await asyncio.gather(*(self.do(tenant, num_tokens) for tenant, num_tokens in requests))
        return self.order


async def test_a_single_request_waits_for_one_of_another_key_and_not_for_all_of_them():
    order = await Work(1).do_all([("a", QUANTUM)] * 200 + [("b", 10)])
    assert order.index("b") <= 2
    assert Counter(order) == {"a": 200, "b": 1}


async def test_keys_share_tokens_and_not_requests():
    order = await Work(1).do_all([("long", 1000)] * 20 + [("short", 100)] * 200)
    first = Counter(order[: order.index("short") + 110])
    assert 8 <= first["long"] <= 14  # a tenth of the requests, and half of the tokens


async def test_requests_of_one_key_come_in_their_order():
    work, begun = Work(1), []

    async def note(number: int) -> None:
        async with work.places.place("a"):
            begun.append(number)

    await asyncio.gather(*map(note, range(20)))
    assert begun == list(range(20))


@given(st.integers(1, 4), st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 500), st.booleans()), max_size=40))
async def test_every_place_is_given_back(num_places: int, requests: list[tuple[str, int, bool]]):
    work = Work(num_places)
    tasks = [asyncio.create_task(work.do(tenant, num_tokens)) for tenant, num_tokens, _ in requests]
    for number, (_, _, is_cancelled) in enumerate(requests):
        if is_cancelled:
            await asyncio.sleep(0)
            tasks[number].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    work.num_running = work.max_running = 0
    async with asyncio.timeout(30):
        await work.do_all([("d", 1)] * num_places)
    assert work.max_running == num_places


@given(st.lists(st.sampled_from("abc"), min_size=2, max_size=60))
async def test_a_key_that_waits_has_its_turn_after_one_or_two_of_each_other(tenants: list[str]):
    order = await Work(1).do_all([(tenant, QUANTUM) for tenant in tenants])
    left = Counter(tenants)
    since = dict.fromkeys(left, 0)
    for tenant in order:
        for other in since:
            since[other] += other != tenant
        since[tenant] = 0
        left[tenant] -= 1
        assert all(count <= 2 * len(since) for other, count in since.items() if left[other] > 0)
