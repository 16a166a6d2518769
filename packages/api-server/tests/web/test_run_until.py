"""Work that ends with its client or its server, in the task of its request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from llmstack_server.web.answers import run_until
from llmstack_server.web.body import ClientDisconnected
from llmstack_server.web.errors import HTTPError


class Work:
    """Work that waits for its gate, and notes how it ended."""

    def __init__(self, end: Callable[[], None] = lambda: None) -> None:
        self.gate = asyncio.Event()
        self.num_cancelled = 0
        self._end = end

    async def run(self) -> None:
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            self._end()
            raise


def futures() -> tuple[asyncio.Future[None], asyncio.Future[None]]:
    loop = asyncio.get_running_loop()
    return loop.create_future(), loop.create_future()


async def outcome_of(work: Work, left: Any, cut: Any) -> tuple[str, int]:
    """The outcome, and how often the task is being cancelled afterwards."""
    task = asyncio.current_task()
    assert task is not None
    try:
        await run_until(work.run(), left, cut)
    except Exception as error:  # noqa: BLE001 (the outcome)
        await asyncio.sleep(0)  # a cancellation that is left would be raised here
        return type(error).__name__, task.cancelling()
    await asyncio.sleep(0)
    return "done", task.cancelling()


async def test_work_is_done_or_ends_with_its_client_or_its_server():
    for first, expected in ((2, "done"), (0, ClientDisconnected.__name__), (1, HTTPError.__name__)):
        work, ends = Work(), futures()
        running = asyncio.create_task(outcome_of(work, *ends))
        await asyncio.sleep(0)
        if first == 2:
            work.gate.set()
        else:
            ends[first].set_result(None)
        assert await running == (expected, 0)
        assert work.num_cancelled == (first != 2)


async def test_an_end_that_was_there_before_ends_it():
    left, cut = futures()
    cut.set_result(None)
    assert await outcome_of(Work(), left, cut) == (HTTPError.__name__, 0)


async def test_an_error_of_work_that_is_ended_does_not_hide_the_end():
    def fail() -> None:
        raise ValueError

    left, cut = futures()
    left.set_result(None)
    assert await outcome_of(Work(fail), left, cut) == (ClientDisconnected.__name__, 0)


async def test_an_end_right_after_the_work_cancels_nothing():
    left, cut = futures()
    work = Work()
    running = asyncio.create_task(outcome_of(work, left, cut))
    await asyncio.sleep(0)
    work.gate.set()
    await asyncio.sleep(0)
    left.set_result(None)  # in the turn in which the work is done
    assert await running == ("done", 0)


async def test_a_cancellation_from_outside_is_raised_also_beside_an_end():
    for is_left in (False, True):
        left, cut = futures()
        running = asyncio.create_task(outcome_of(Work(), left, cut))
        await asyncio.sleep(0)
        if is_left:
            left.set_result(None)
            await asyncio.sleep(0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
