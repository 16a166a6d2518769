"""A stream that is begun again goes on where its reader has stopped, however it is cut into events."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from llmstack_server.web.event_splice import EarlierStream, OtherTextError

DONE = b"data: [DONE]\n\n"


def chunk(run: str, index: int, delta: dict[str, Any], finish: str | None = None, **fields: Any) -> bytes:
    choice = {"index": index, "delta": delta, "finish_reason": finish, **fields}
    event = {"id": run, "object": "chat.completion.chunk", "created": len(run), "choices": [choice]}
    event |= {} if finish is None else {"system_fingerprint": "the same in both runs"}
    return b"data: " + json.dumps(event).encode() + b"\n\n"


def pieces(text: str, rng: random.Random) -> list[str]:
    places = sorted(rng.sample(range(1, len(text)), rng.randrange(len(text) - 1)))
    return [text[begin:end] for begin, end in zip([0, *places], [*places, len(text)], strict=True)]


def run_of(run: str, texts: tuple[str, ...], rng: random.Random) -> list[bytes]:
    """One run: each choice reasons, answers and ends; those of several choices are mixed, differently in each run.

    What comes at a boundary is in one event or in two: the end of the reasoning, and the end of the answer.
    """
    queues = []
    for index, text in enumerate(texts):
        half = len(text) // 2
        events = [chunk(run, index, {"role": "assistant", "content": ""})]
        events += [chunk(run, index, {"reasoning": piece}) for piece in pieces(text[:half], rng)]
        parts = pieces(text[half:], rng)
        events += [
            chunk(run, index, {"content": piece}, logprobs={"content": [{"token": char} for char in piece]})
            for piece in parts
        ]
        queues.append(merged([*events, chunk(run, index, {}, "stop")], rng))
    mixed = []
    while any(queues):
        mixed.append(rng.choice([queue for queue in queues if queue]).pop(0))
    return [*mixed, DONE]


def merged(events: list[bytes], rng: random.Random) -> list[bytes]:
    """Some neighbours without fields in common as one event, as where several outputs come at once."""
    found: list[dict[str, Any]] = []
    for raw in events:
        event = json.loads(raw.removeprefix(b"data: "))
        (choice,) = event["choices"]
        last = found[-1]["choices"][0] if found else choice
        is_open = "role" not in last["delta"] and last["delta"].keys().isdisjoint(choice["delta"])
        if found and is_open and rng.random() < 0.5:
            choice["delta"] = last["delta"] | choice["delta"]
            found[-1] |= event | {"choices": [last | choice]}
        else:
            found.append(event)
    return [b"data: " + json.dumps(event).encode() + b"\n\n" for event in found]


def read(events: list[bytes]) -> dict[int, tuple[str, str, int, int]]:
    """Of each choice: reasoning, text, log-probabilities, ends."""
    found: dict[int, tuple[str, str, int, int]] = {}
    for raw in events[:-1]:
        (choice,) = json.loads(raw.removeprefix(b"data: "))["choices"]
        reasoning, text, count, ends = found.get(choice["index"], ("", "", 0, 0))
        found[choice["index"]] = (
            reasoning + choice["delta"].get("reasoning", ""),
            text + choice["delta"].get("content", ""),
            count + len((choice.get("logprobs") or {"content": ()})["content"]),
            ends + (choice["finish_reason"] is not None),
        )
    return found


@pytest.mark.parametrize("texts", [("a story of a fox",), ("one answer", "another one", "a third")])
def test_two_runs_are_one_stream_wherever_the_first_one_was_cut(texts: tuple[str, ...]):
    rng = random.Random(7)
    for _ in range(200):
        first, second = run_of("first", texts, rng), run_of("another", texts, rng)
        seen = first[: rng.randrange(1, len(first))]
        earlier = EarlierStream(seen)
        rest = [event for event in map(earlier.rest_of, second) if event is not None]
        whole = [*seen, *rest]
        assert read(whole) == read(first)
        assert whole[-1] == DONE
        assert {json.loads(event.removeprefix(b"data: "))["id"] for event in whole[:-1]} == {"first"}


@pytest.mark.parametrize(
    "second",
    [
        [chunk("b", 0, {"content": "a cot"})],
        [chunk("b", 0, {"content": "a"}), chunk("b", 0, {}, "stop")],
        [chunk("b", 0, {"content": "a"}), chunk("b", 0, {"reasoning": "cat"})],
    ],
)
def test_another_text_is_never_passed_on(second: list[bytes]):
    earlier = EarlierStream([chunk("a", 0, {"content": "a "}), chunk("a", 0, {"content": "cat"})])
    *same, other = second
    assert [earlier.rest_of(event) for event in same] == [None] * len(same)
    with pytest.raises(OtherTextError):
        earlier.rest_of(other)


@pytest.mark.parametrize("is_whole", [True, False])
def test_an_end_that_came_alone_may_come_with_the_last_piece_and_the_other_way_round(is_whole: bool):
    pieces = [chunk("a", 0, {"content": "a c"}), chunk("a", 0, {"content": "at"})]
    alone, together = chunk("a", 0, {}, "stop"), chunk("a", 0, {"content": "a cat" if is_whole else "at"}, "stop")
    runs = [*pieces, alone], [together] if is_whole else [pieces[0], together]
    for first, second in (runs, runs[::-1]):
        earlier = EarlierStream(first)
        assert [earlier.rest_of(event) for event in second] == [None] * len(second)


def test_a_last_piece_may_come_with_the_end():
    earlier = EarlierStream([chunk("a", 0, {"content": "a c"})])
    rest = earlier.rest_of(chunk("b", 0, {"content": "a cat"}, "stop"))
    assert rest is not None
    assert read([rest, DONE]) == {0: ("", "at", 0, 1)}
