"""The loop and its clients: who gets what, and what becomes of those that leave."""

from __future__ import annotations

import pytest

from llmstack_engine_core import EngineConfig, build_engine_core
from llmstack_engine_core.engine_loop import MAX_CLIENTS, EngineLoop
from llmstack_engine_core.ipc.link import Link
from llmstack_engine_core.messages.protocol import (
    AbortRequests,
    EngineFailed,
    EngineMessage,
    Goodbye,
    Hello,
    StartFailed,
)
from llmstack_types import EngineCoreOutputs, EngineCoreRequest, EngineReady, ModelRunnerConfig, SamplingParams


class Loop(EngineLoop):
    """A loop that the test drives; messages to clients that are gone are lost."""

    def __init__(self) -> None:
        super().__init__(build_engine_core(EngineConfig(ModelRunnerConfig("echo"), runner="echo")))
        self.sent: list[tuple[bytes, EngineMessage]] = []
        self.gone: set[bytes] = set()

    def say(self, client: bytes, *messages: object) -> None:
        for message in messages:
            self._handle(client, message)  # type: ignore[arg-type]  # the tests send what clients send

    def step(self) -> None:
        self._send_outputs(self._core.step())

    def outputs_of(self, client: bytes) -> list[EngineCoreOutputs]:
        return [message for to, message in self.sent if to == client and isinstance(message, EngineCoreOutputs)]

    def _receive(self, wait_ms: int) -> bool:
        raise NotImplementedError("the test says what comes")

    def _send(self, client: bytes, message: EngineMessage) -> None:
        if client in self.gone:
            self._drop(client)
        else:
            self.sent.append((client, message))


def request(request_id: str, max_tokens: int = 8) -> EngineCoreRequest:
    return EngineCoreRequest(request_id, [5, 6, 7], SamplingParams(max_tokens=max_tokens, seed=0))


@pytest.fixture
def loop() -> Loop:
    return Loop()


def test_a_later_connection_of_a_client_ends_what_an_earlier_one_has_left(loop: Loop) -> None:
    first, second, other = (
        Link(client_name=name, epoch=epoch).identity(0) for name, epoch in (("a", 1), ("a", 2), ("b", 1))
    )
    loop.say(first, Hello(), request("r"))
    loop.say(other, Hello(), request("theirs"))
    loop.say(second, Hello(), request("r"))  # the same one goes on, though the earlier connection has not been missed
    loop.step()
    assert loop.outputs_of(second)[0].outputs[0].error is None
    assert not loop.outputs_of(first)
    assert loop.outputs_of(other)[0].outputs
    loop.say(first, Hello())  # a frame that was on its way
    assert isinstance(loop.sent[-1][1], StartFailed)
    loop.step()
    assert len(loop.outputs_of(second)) == 2


def test_the_goodbye_of_a_client_that_has_not_said_hello_is_no_fault(
    loop: Loop, caplog: pytest.LogCaptureFixture
) -> None:
    loop.say(b"a", Goodbye())
    assert not caplog.records
    assert not loop.sent
    loop.say(b"a", AbortRequests(["r"]))
    assert isinstance(loop.sent[-1][1], EngineFailed)


def test_a_step_goes_to_those_it_concerns_and_to_the_first_client(loop: Loop) -> None:
    loop.say(b"c", Hello(), request("r", max_tokens=6))
    loop.say(b"a", Hello())
    loop.say(b"b", Hello())
    for _ in range(4):
        loop.step()
    # The first by name sees each step's figures, an idle one those of the first step and then some each 0.1 s.
    assert [len(loop.outputs_of(client)) for client in (b"a", b"b", b"c")] == [4, 1, 4]
    assert not any(message.outputs or message.events for client in (b"a", b"b") for message in loop.outputs_of(client))
    while loop._core.has_unfinished_requests():
        loop.step()
    last = [loop.outputs_of(client)[-1].scheduler_stats for client in (b"a", b"b", b"c")]
    assert [stats.num_running for stats in last if stats is not None] == [0, 0, 0]


def test_the_states_of_a_request_reach_its_owner_even_if_it_ends_in_its_first_step(loop: Loop) -> None:
    loop.say(b"a", Hello())
    loop.say(b"b", Hello(), request("r", max_tokens=1))
    loop.step()
    (step,) = loop.outputs_of(b"b")
    assert [event.request_id for event in step.events] == ["r"] * len(step.events)
    assert step.events


def test_a_client_that_connects_again_loses_its_earlier_requests(loop: Loop) -> None:
    loop.say(b"a", Hello(), request("old"))
    loop.step()
    loop.say(b"a", Hello(), request("old"))  # the id is free again
    loop.step()
    assert loop._core.stats().num_running == 1


def test_the_requests_of_a_client_that_is_gone_end_with_the_next_step(loop: Loop) -> None:
    loop.say(b"a", Hello(), request("a"))
    loop.say(b"b", Hello(), request("b"))
    loop.step()
    loop.gone.add(b"a")
    for _ in range(2):
        loop.step()
    assert loop._core.stats().num_running == 1
    assert list(loop._clients) == [b"b"]


def test_a_client_that_is_not_known_any_more_receives_an_error_and_does_not_wait(loop: Loop) -> None:
    loop.say(b"stranger", request("r"))
    assert isinstance(loop.sent[-1][1], EngineFailed)
    assert not loop._core.has_unfinished_requests()


def test_a_client_that_says_goodbye_ends_its_requests_and_receives_nothing_more(loop: Loop) -> None:
    loop.say(b"a", Hello(), request("r"), Goodbye())
    loop.sent.clear()
    while loop._core.has_unfinished_requests():
        loop.step()
    assert loop.sent == []


def test_a_client_cannot_end_the_request_of_another(loop: Loop) -> None:
    loop.say(b"a", Hello(), request("r"))
    loop.say(b"b", Hello(), AbortRequests(("r",)))
    loop.step()
    assert loop._core.stats().num_running == 1


def test_the_number_of_clients_is_bounded_and_those_that_are_gone_make_room(loop: Loop) -> None:
    names = [f"client-{index}".encode() for index in range(MAX_CLIENTS)]
    for name in names:
        loop.say(name, Hello())
    loop.say(b"one more", Hello())
    assert loop.sent[-1][0] == b"one more"
    assert isinstance(loop.sent[-1][1], StartFailed)
    loop.gone.add(names[7])
    loop.say(b"one more", Hello())
    assert isinstance(loop.sent[-1][1], EngineReady)


def test_a_runner_that_is_lost_without_a_request_ends_the_loop(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    def check_processes() -> None:
        raise RuntimeError("a process has ended")

    has_messages = iter([False] * 3)
    monkeypatch.setattr(loop, "_receive", lambda wait_ms: next(has_messages))
    loop.say(b"client", Hello())
    loop.run_once()
    monkeypatch.setattr(loop._core.runner, "check_processes", check_processes, raising=False)
    with pytest.raises(RuntimeError, match="a process has ended"):
        loop.run()
    assert [message for _, message in loop.sent if isinstance(message, EngineFailed)]
