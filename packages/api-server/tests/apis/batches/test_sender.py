"""Requests of a batch that are refused, for now or for ever."""

from __future__ import annotations

from typing import Any

import pytest

from llmstack_server.apis.batches.fair_places import FairPlaces, Place
from llmstack_server.apis.batches.lines import BatchAnswer, BatchRequest
from llmstack_server.apis.batches.sender import MAX_IDLE_REFUSALS, Sender
from llmstack_server.apis.batches.transport import TransportError

REQUEST = BatchRequest(1, "a", "/x", b"{}")


def refused(code: str | None, status: int = 503) -> BatchAnswer:
    return BatchAnswer(status, "r", {"error": {"code": code}})


class Script:
    """A transport whose answers are known."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)

    async def send(self, request: BatchRequest) -> BatchAnswer:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer  # type: ignore[no-any-return]


class Traffic:
    """Requests that wait until `num_waits` times something has come to its end."""

    def __init__(self, num_waits: int = 0, *, is_idle: bool = True) -> None:
        self.num_waits = num_waits
        self.is_idle = is_idle

    @property
    def is_busy(self) -> bool:
        return self.num_waits > 0

    async def wait_until_drained(self) -> None:
        self.num_waits -= 1


async def test_a_turn_comes_when_no_request_waits_any_more_or_the_batch_has_ended():
    traffic = Traffic(num_waits=3)
    sender = Sender(Script(), FairPlaces(1, 1), traffic, 100)
    await sender.wait_for_turn(lambda: traffic.num_waits == 1)
    assert traffic.num_waits == 1
    await sender.wait_for_turn(lambda: False)
    assert traffic.num_waits == 0


async def sent(*answers: Any, idle: bool = True) -> list[int | None]:
    sender = Sender(Script(*answers), FairPlaces(1, 1), Traffic(is_idle=idle), 100)
    found = [await sender.send(REQUEST, Place()) for _ in answers]
    return [None if answer is None else answer.status for answer in found]


@pytest.mark.parametrize("code", ["server_is_overloaded", "deadline_unreachable", "rate_limit_exceeded"])
async def test_what_an_idle_server_refuses_again_and_again_has_its_answer(code: str):
    answers = [refused(code)] * MAX_IDLE_REFUSALS
    assert await sent(*answers) == [*[None] * (MAX_IDLE_REFUSALS - 1), 503]


async def test_what_a_busy_server_refuses_is_sent_again():
    answers = [refused("server_is_overloaded")] * 20
    assert await sent(*answers, BatchAnswer(200, "r", {}), idle=False) == [*[None] * 20, 200]


@pytest.mark.parametrize("code", ["server_shutting_down", "engine_unavailable", "storage_unavailable", None])
async def test_what_the_state_of_the_server_refuses_is_sent_again(code: str | None):
    assert await sent(*[refused(code)] * 20, TransportError(), BatchAnswer(200, "r", {})) == [*[None] * 21, 200]


@pytest.mark.parametrize(
    ("body", "num_tokens"),
    [
        ({"usage": {"prompt_tokens": 3, "total_tokens": 12, "details": {}}}, 12),
        ({"usage": {"input_tokens": 3, "output_tokens": 4}}, 4),
        ({"usage": None}, 0),
        ({}, 0),
        ({"text": "", "usage": {"type": "duration", "seconds": 30}}, 1500),
        ("1\n00:00", 7),
    ],
)
async def test_an_answer_costs_what_it_says(body: Any, num_tokens: int):
    place = Place()
    sender = Sender(Script(BatchAnswer(200, "r", body)), FairPlaces(1, 1), Traffic(), 100)
    await sender.send(REQUEST, place)
    assert place.num_tokens == num_tokens
