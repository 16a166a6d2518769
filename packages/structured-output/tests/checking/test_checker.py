"""Order and limits of compiling constraints, with a checking process that answers when the test says so."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from llmstack_structured_output import ConstraintChecker
from llmstack_structured_output.checking import answers, budgets, queue
from llmstack_structured_output.testing import BYTE_VOCAB_SIZE, EOS_TOKEN_ID
from llmstack_types import InvalidRequestError, ServerOverloadedError, StructuredOutputsParams, TenantLimitError
from llmstack_types.child_pool.client import Outcome

COMPILES = Outcome({}, is_late=False, is_starved=False, processor_s=0.01)
LATE = Outcome(None, is_late=True, is_starved=False, processor_s=5.0)
LATE_IN_QUICK_LANE = Outcome(None, is_late=True, is_starved=False, processor_s=0.25)
STARVED = Outcome(None, is_late=False, is_starved=True, processor_s=0.1)


class FakeClient:
    """Stands for the checking process: a constraint is compiled when the test sets its outcome."""

    def __init__(self) -> None:
        self.running: dict[str, asyncio.Future[Outcome]] = {}
        self.started: list[tuple[str, bool]] = []
        self.is_shut_down = False

    async def run(self, job: dict[str, Any], *, limit_s: float, is_slow: bool) -> Outcome:
        if self.is_shut_down:
            raise ServerOverloadedError("shut down")
        name = str(job["regex"] or job["json"])
        assert name not in self.running
        self.started.append((name, is_slow))
        outcome = self.running[name] = asyncio.get_running_loop().create_future()
        return await outcome

    async def end(self, name: str, outcome: Outcome = COMPILES) -> None:
        self.running.pop(name).set_result(outcome)
        await settle()

    async def shutdown(self) -> None:
        self.is_shut_down = True
        running, self.running = self.running, {}
        for outcome in running.values():
            outcome.set_exception(ServerOverloadedError("shut down"))


class Bench:
    """A checker, its process, and a clock."""

    def __init__(self, folder: Path) -> None:
        self.now_s = 0.0
        self.tasks: list[asyncio.Task[None]] = []
        self.client = FakeClient()
        self.checker = ConstraintChecker(folder, BYTE_VOCAB_SIZE, [EOS_TOKEN_ID], clock=lambda: self.now_s)
        self.checker._client = self.client  # type: ignore[assignment]

    async def ask(self, tenant: str = "", **constraint: Any) -> asyncio.Task[None]:
        self.tasks.append(
            task := asyncio.create_task(self.checker.check(StructuredOutputsParams(**constraint), tenant))
        )
        await settle()
        return task


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.fixture
async def bench(folder: Path) -> AsyncIterator[Bench]:
    bench = Bench(folder)
    yield bench
    await bench.checker.shutdown()
    await asyncio.gather(*bench.tasks, return_exceptions=True)


def slow_schema(number: int = 0) -> str:
    """A schema that is expected to take long, by its shape."""
    branches = ",".join(f'{{"pattern": "a{{900}}{number}b{n}"}}' for n in range(30))
    return f'{{"allOf": [{branches}]}}'


async def test_eight_slow_schemas_do_not_hold_up_a_cheap_regex_of_the_same_or_of_another_key(bench: Bench) -> None:
    for number in range(3):
        await bench.ask("a", json=slow_schema(number))
        await bench.ask("b", json=slow_schema(10 + number))
    for tenant in ("a", "b", "c"):
        cheap = await bench.ask(tenant, regex=tenant)
        await bench.client.end(tenant)
        assert cheap.done()


async def test_schemas_that_only_look_cheap_leave_the_quick_lane_and_begin_again_in_the_slow_one(bench: Bench) -> None:
    waiting = await bench.ask("a", regex="looks cheap")
    await bench.client.end("looks cheap", LATE_IN_QUICK_LANE)
    assert bench.client.started == [("looks cheap", False), ("looks cheap", True)]
    assert not waiting.done()
    await bench.client.end("looks cheap", LATE)
    with pytest.raises(InvalidRequestError, match="longer than 5 s"):
        await waiting


async def test_one_key_leaves_a_place_of_each_lane_free_for_another(bench: Bench) -> None:
    for number in range(3):
        await bench.ask("greedy", json=slow_schema(number))
        await bench.ask("greedy", regex=f"greedy{number}")
    assert len(bench.client.running) == queue.NUM_SLOW - 1 + queue.NUM_QUICK - 1
    await bench.ask("other", json=slow_schema(9))
    await bench.ask("other", regex="other")
    assert {slow_schema(9), "other"} <= bench.client.running.keys()


async def test_the_key_that_has_used_least_is_next_and_of_its_constraints_the_cheapest(bench: Bench) -> None:
    await bench.ask("a", regex="a")
    await bench.ask("b", regex="b")
    await bench.ask("a", regex="x" * 900)
    await bench.ask("a", regex="second of a")
    await bench.ask("c", regex="first of c")
    await bench.client.end("a", Outcome({}, is_late=False, is_starved=False, processor_s=0.2))
    assert bench.client.started[-1][0] == "first of c"
    await bench.client.end("first of c")
    assert bench.client.started[-1][0] == "second of a"


async def test_equal_constraints_of_one_key_are_compiled_once_and_a_caller_that_leaves_ends_nothing(
    bench: Bench,
) -> None:
    leaving, staying = await bench.ask("a", regex="x"), await bench.ask("a", regex="x")
    leaving.cancel()
    await settle()
    assert bench.client.started == [("x", False)]
    await bench.client.end("x")
    await staying


async def test_a_constraint_that_all_have_left_does_not_begin_and_gives_its_time_back(bench: Bench) -> None:
    first, second = await bench.ask("a", json=slow_schema(0)), await bench.ask("a", json=slow_schema(1))
    second.cancel()
    await settle()
    await bench.client.end(slow_schema(0))
    assert first.done()
    assert bench.client.started == [(slow_schema(0), True)]
    assert bench.checker._budgets.used_s("a") == pytest.approx(COMPILES.processor_s)


async def test_a_constraint_that_all_have_left_while_it_was_compiled_is_remembered(bench: Bench) -> None:
    leaving = await bench.ask("a", regex="x")
    leaving.cancel()
    await settle()
    await bench.client.end("x")
    await (await bench.ask("a", regex="x"))
    assert len(bench.client.started) == 1


async def test_what_was_refused_is_refused_at_once_for_a_while(bench: Bench) -> None:
    waiting = await bench.ask("a", json=slow_schema())
    await bench.client.end(slow_schema(), LATE)
    for _ in range(2):
        with pytest.raises(InvalidRequestError, match="longer than 5 s"):
            await waiting
        waiting = await bench.ask("a", json=slow_schema())
    assert len(bench.client.started) == 1
    await asyncio.gather(waiting, return_exceptions=True)
    bench.now_s = answers.REFUSAL_S
    waiting = await bench.ask("a", json=slow_schema())
    assert len(bench.client.started) == 2
    waiting.cancel()


async def test_the_time_of_a_key_is_bounded_and_cheap_constraints_have_a_part_of_it(bench: Bench) -> None:
    num_allowed = int((budgets.CAPACITY_S - budgets.RESERVE_S) / 5.0)
    tasks = [await bench.ask("a", json=slow_schema(number)) for number in range(num_allowed)]
    with pytest.raises(TenantLimitError) as caught:
        await (await bench.ask("a", json=slow_schema(99)))
    cheap = await bench.ask("b", regex="of another key")
    await bench.client.end("of another key")
    assert cheap.done()
    for number, task in enumerate(tasks):
        await bench.client.end(slow_schema(number), LATE)
        assert task.done()
    bench.now_s += 1.0
    await bench.ask("a", regex="cheap")
    assert bench.client.started[-1] == ("cheap", False)
    bench.now_s += caught.value.wait_s + (num_allowed * 5.0) / budgets.REFILL_PER_S
    await bench.ask("a", json=slow_schema(99))
    assert bench.client.started[-1] == (slow_schema(99), True)
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_busy_machine_is_no_fault_of_the_constraint(bench: Bench) -> None:
    waiting = await bench.ask("a", json=slow_schema())
    await bench.client.end(slow_schema(), STARVED)
    with pytest.raises(ServerOverloadedError):
        await waiting
    await bench.ask("a", json=slow_schema())
    assert len(bench.client.started) == 2, "it is tried again"


async def test_a_key_cannot_fill_the_queue(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "MAX_WAITING", 8)
    asked = [await bench.ask("greedy", regex=f"x{number}") for number in range(8)]
    refused = [task for task in asked if task.done()]
    assert len(refused) == 3
    for task in refused:
        with pytest.raises(ServerOverloadedError):
            await task
    for number in range(3):
        assert not (await bench.ask("other", regex=f"y{number}")).done()


async def test_a_constraint_far_over_its_limit_costs_no_process(bench: Bench) -> None:
    for constraint, code in (
        ({"json": '"' + "x" * 70_000 + '"'}, "schema_too_complex"),
        ({"regex": "x" * 9_000}, "grammar_too_complex"),
        ({"grammar": "x" * 40_000}, "grammar_too_complex"),
        ({"choice": ["x" * 70_000]}, "grammar_too_complex"),
        ({"choice": ["x"] * 1_001}, "grammar_too_complex"),
    ):
        with pytest.raises(InvalidRequestError) as caught:
            await (await bench.ask("a", **constraint))
        assert caught.value.code == code
    assert not bench.client.started


async def test_those_that_wait_are_refused_when_the_checker_is_shut_down(bench: Bench) -> None:
    asked = [await bench.ask("a", regex=f"x{number}") for number in range(3)]
    await bench.checker.shutdown()
    for task in asked:
        with pytest.raises(ServerOverloadedError):
            await task


async def test_nothing_stays_of_checks_that_are_over(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "MAX_NUM_REMEMBERED", 4)
    for number in range(10):
        waiting = await bench.ask("a", regex=f"x{number}")
        await bench.client.end(f"x{number}")
        await waiting
    checker = bench.checker
    assert not checker._checks
    assert not checker._by_job
    assert not checker._running
    assert len(checker._answers) == 4
    assert checker._queue.num_waiting == 0


def test_the_accounts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budgets, "MAX_TENANTS", 3)
    now_s = 0.0
    clock: Callable[[], float] = lambda: now_s  # noqa: E731
    accounts = budgets.CompileBudgets(clock)
    for number in range(10):
        accounts.reserve(str(number), 1.0)
        accounts.settle(str(number), 1.0, 1.0 + number)
        assert accounts.num_tenants <= 3
    assert accounts.used_s("9") == 10.0, "the tenant that has used most is not forgotten"
    now_s = 1000.0
    assert accounts.used_s("9") == 0.0
