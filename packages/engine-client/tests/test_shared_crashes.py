"""Clients that share an engine core which dies: a crash counts only against what it had received."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace

import pytest
from engine_client_helpers.scripted import READY, Engine
from engine_core_helpers.processes import wait_until

from llmstack_engine_client import BalancedClient, RecoveringClient
from llmstack_engine_client.recovery import recovering
from llmstack_engine_core.messages.protocol import ENGINE_STOPPED
from llmstack_types import (
    EngineCoreRequest,
    EngineDeadError,
    EngineLostError,
    QuarantinedError,
    SamplingParams,
)

NEVER_S = 1000.0
SIGKILL, SIGSEGV = "killed by SIGKILL", "killed by SIGSEGV"


@pytest.fixture(autouse=True)
def no_causes(monkeypatch: pytest.MonkeyPatch) -> None:
    """No client waits for the cause of an end; a test may give it before."""
    monkeypatch.setattr(recovering, "CAUSE_WAIT_S", 0.0)


class Shared:
    """One of the clients of an engine core, of which each has another process id."""

    def __init__(self, turn: int = 1, first_pid: int = 1) -> None:
        self.engines: list[Engine] = []
        self.ends: dict[str, str | None] = {}
        self.contract_id = READY.numeric_contract_id

        def start() -> Engine:
            pid = first_pid + len(self.engines)
            self.engines.append(Engine(replace(READY, pid=pid, numeric_contract_id=self.contract_id)))
            return self.engines[-1]

        self.client = RecoveringClient(start, max_restarts=100, shared_turn=turn)
        self._reading = asyncio.ensure_future(self._read())

    async def _read(self) -> None:
        while True:
            for output in (await self.client.get_outputs()).outputs:
                if output.finish_reason is not None:
                    self.ends[output.request_id] = output.error

    @property
    def engine(self) -> Engine:
        return self.engines[-1]

    @property
    def sent(self) -> list[str]:
        return list(self.engine.requests)

    async def add(self, *request_ids: str) -> None:
        for request_id in request_ids:
            await self.client.add_request(EngineCoreRequest(request_id, [5, 6], SamplingParams(max_tokens=8, seed=0)))

    async def die(self, how: str = "", *, is_outside: bool = False) -> None:
        """Returns when another engine core is ready; `how` comes from the supervisor."""
        number = len(self.engines)
        if how:
            self.client.note_death(number, how, is_outside=is_outside)
        self.engine.die()
        await wait_until(lambda: len(self.engines) > number and self.engine.is_up)

    async def close(self) -> None:
        self._reading.cancel()
        await self.client.shutdown()


async def started(turn: int = 1, first_pid: int = 1) -> Shared:
    shared = Shared(turn, first_pid)
    await shared.client.wait_until_ready()
    return shared


async def test_a_client_that_waits_for_its_turn_notices_that_the_next_engine_core_died_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recovering, "TURN_S", NEVER_S)
    shared = await started()
    await shared.add("innocent")
    await shared.die()
    await wait_until(lambda: shared.sent == ["innocent"])
    for _ in range(6):  # the search of another client: nothing of this one is in these
        await shared.die()
        assert shared.sent == []
        await shared.client.add_request(newcomer(len(shared.engines)))
    monkeypatch.setattr(recovering, "TURN_S", 0.0)
    await shared.die()
    await wait_until(lambda: "innocent" in shared.sent)
    shared.engine.say("innocent", *range(8))
    await wait_until(lambda: len(shared.sent) == 7)
    for name in shared.sent:
        shared.engine.say(name, 9, is_end=True)
    await wait_until(lambda: len(shared.ends) == 7)
    assert set(shared.ends.values()) == {None}
    await shared.close()


def newcomer(number: int) -> EngineCoreRequest:
    return EngineCoreRequest(f"new{number}", [5, 6], SamplingParams(max_tokens=8, seed=0))


async def test_a_request_sent_to_a_dead_engine_core_is_no_cause_of_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovering, "TURN_S", 0.0)
    shared = await started()
    for _ in range(10):  # each time its send finds the engine core dead, before the client was notified
        shared.engine._mailbox.set_dead("it was killed")
        number = len(shared.engines)
        if not shared.client.num_requests:
            await shared.add("late")
        else:
            shared.engine._wake()
        await wait_until(lambda number=number: len(shared.engines) > number and not shared.client.is_recovering)
        assert shared.sent == ["late"]
        shared.engine.say("late", *range(8))
        shared.engine.say("late", 9, is_end=True)
        await wait_until(lambda: not shared.client.num_requests)
    assert shared.ends == {"late": None}
    await shared.close()


async def test_the_rest_of_a_group_that_found_its_engine_core_dead_goes_on_in_the_next_one() -> None:
    shared = await started(turn=0)
    await shared.add("a", "b", "c", "d")
    await shared.die()
    await wait_until(lambda: len(shared.sent) == 4)
    await shared.die()
    await wait_until(lambda: shared.sent == ["a", "b"])
    shared.engine._mailbox.set_dead("it was killed")
    await shared.client._send_held(["c", "d"])  # as if the group in test had just got its tokens
    await wait_until(lambda: len(shared.engines) == 4 and bool(shared.sent))
    assert shared.sent == ["a"]
    for name in "abcd":
        await wait_until(lambda name=name: name in shared.sent)
        shared.engine.say(name, *range(8), 9)
        shared.engine.say(name, 9, is_end=True)
    await wait_until(lambda: len(shared.ends) == 4)
    assert set(shared.ends.values()) == {None}
    await shared.close()


async def test_a_lone_request_is_quarantined_after_crashes_but_not_after_as_many_ends_from_outside() -> None:
    for is_outside, num_survived in ((False, 3), (True, 4)):
        shared = await started(turn=0)
        await shared.add("one")
        for _ in range(num_survived):
            await shared.die(SIGKILL if is_outside else SIGSEGV, is_outside=is_outside)
            await wait_until(lambda shared=shared: shared.sent == ["one"])
        await shared.die(SIGKILL if is_outside else SIGSEGV, is_outside=is_outside)
        await wait_until(lambda shared=shared: "one" in shared.ends)
        assert shared.ends == {"one": QuarantinedError.KILLS_ENGINES}
        await shared.close()


async def test_any_number_of_ends_from_outside_counts_against_no_request() -> None:
    shared = await started(turn=0)
    await shared.add("one", "other")
    for _ in range(30):
        await shared.die(SIGKILL, is_outside=True)
        await wait_until(lambda: shared.sent == ["one", "other"])
        shared.engine.say("one", *range(8))
        await wait_until(lambda: not shared.client._suspects.has_any or "one" not in shared.client._suspects._in_test)
    assert shared.ends == {}
    await shared.close()


async def test_the_cause_may_come_after_the_end_of_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovering, "CAUSE_WAIT_S", NEVER_S)
    shared = await started(turn=0)
    await shared.add("one")
    shared.engine.die()
    await wait_until(lambda: shared.client.is_recovering)
    shared.client.note_death(7, SIGSEGV, is_outside=False)  # of another engine core
    await asyncio.sleep(0.05)
    assert len(shared.engines) == 1
    shared.client.note_death(1, SIGKILL, is_outside=True)
    await wait_until(lambda: len(shared.engines) == 2 and shared.sent == ["one"])
    await shared.close()


async def test_a_client_whose_supervisor_is_silent_waits_for_it_once() -> None:
    shared = await started(turn=0)
    await shared.die()
    await wait_until(lambda: not shared.client.is_recovering)
    recovering.CAUSE_WAIT_S = NEVER_S  # undone by the fixture
    await shared.die()
    await shared.close()


async def test_an_engine_core_that_was_asked_to_end_is_replaced_where_a_supervisor_says_so() -> None:
    for is_notified in (True, False):
        shared = await started(turn=0)
        await shared.add("one")
        if is_notified:
            shared.client.note_death(1, "exit status 0", is_outside=True)
        shared.engine._mailbox.set_dead(ENGINE_STOPPED)
        shared.engine._wake()
        if is_notified:
            await wait_until(lambda shared=shared: len(shared.engines) == 2 and shared.sent == ["one"])
        else:
            await wait_until(lambda shared=shared: shared.client.is_dead)
            with pytest.raises(EngineDeadError, match=ENGINE_STOPPED):
                await shared._reading
        await shared.close()


async def test_the_log_has_the_cause_of_each_death(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(recovering, "TURN_S", NEVER_S)
    shared = await started()
    await shared.add("one")
    await shared.die(SIGSEGV)
    await wait_until(lambda: shared.sent == ["one"])
    with caplog.at_level(logging.ERROR):
        for how in ("killed by SIGBUS", SIGKILL, "killed by SIGABRT"):  # the second and third in its turn
            caplog.clear()
            await shared.die(how, is_outside=how == SIGKILL)
            assert [record.args[0] for record in caplog.records if isinstance(record.args, tuple)] == [how]
    await shared.close()


class Unready(Engine):
    """One that dies while it loads."""

    def __init__(self) -> None:
        super().__init__(None)
        self._mailbox.set_dead("out of memory")


async def test_the_log_has_the_reason_of_one_that_did_not_come_up(caplog: pytest.LogCaptureFixture) -> None:
    kinds: list[Callable[[], Engine]] = [Engine, Unready, Engine]
    client = RecoveringClient(lambda: kinds.pop(0)(), max_restarts=9)
    client._limits.backoff_s = lambda: 0.0  # type: ignore[method-assign]
    with caplog.at_level(logging.ERROR):
        await client.wait_until_ready()
        client._client._mailbox.set_dead("killed by SIGKILL")
        assert client.get_outputs_nowait() is None
        await wait_until(lambda: not kinds and not client.is_recovering)
    assert [text.partition(": starting")[0] for text in caplog.messages] == [
        "the engine core died (killed by SIGKILL)", "it did not come up: out of memory",
        "the engine core died (out of memory)",
    ]  # fmt: skip
    await client.shutdown()


async def test_weights_that_changed_while_this_client_waited_for_its_turn_end_its_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recovering, "TURN_S", NEVER_S)
    shared = await started()
    await shared.add("one")
    await shared.die()
    await wait_until(lambda: shared.sent == ["one"])
    shared.contract_id = "other"
    await shared.die()
    monkeypatch.setattr(recovering, "TURN_S", 0.0)
    await shared.die()  # the one after it has the same weights as this
    await wait_until(lambda: shared.ends)
    assert shared.ends == {"one": EngineLostError.TEXT}
    await shared.close()


async def test_what_another_replica_adopts_is_a_suspect_only_after_a_crash() -> None:
    for is_outside in (True, False):
        replicas = [await started(turn=0, first_pid=10 * index) for index in range(2)]
        client = BalancedClient([one.client for one in replicas])
        await client.wait_until_ready()
        await client.add_request(newcomer(1))
        (index,) = (index for index in range(2) if replicas[index].sent)
        dying, other = replicas[index], replicas[1 - index]
        client.note_death(dying.engine.engines[0].pid, SIGKILL, is_outside=is_outside)
        dying.engine.die()
        await wait_until(lambda other=other: other.sent)
        assert other.client._suspects.has_any is not is_outside
        await client.shutdown()
        for one in replicas:
            one._reading.cancel()
