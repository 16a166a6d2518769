"""A second run of a response after the events of its first: readers get what they have not seen, once."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmstack_server.apis.responses.splice import EarlierEvents, OtherTextError

Event = dict[str, Any]


def run_of(parts: list[tuple[str, str]], cuts: list[int], has_logprobs: bool) -> list[Event]:
    """The events of a response whose items have these kinds and texts, cut into deltas of these lengths."""
    events: list[Event] = [{"type": "response.created"}]
    lengths = iter(cuts * 100)
    for index, (kind, text) in enumerate(parts):
        events.append(
            {"type": "response.output_item.added", "output_index": index, "item": {"id": str(index), "type": kind}}
        )
        start = 0
        while start < len(text):
            delta = text[start : start + next(lengths)]
            event: Event = {"type": f"response.{kind}.delta", "output_index": index, "delta": delta}
            events.append(event | ({"logprobs": list(delta)} if has_logprobs and kind == "text" else {}))
            start += len(delta)
        events.append({"type": f"response.{kind}.done", "output_index": index, "text": text})
    return [*events, {"type": "response.completed"}]


def spliced(seen: list[Event], second: list[Event]) -> list[Event]:
    earlier = EarlierEvents(seen)
    return [*seen, *(rest for event in second if (rest := earlier.rest_of(event)) is not None)]


def as_one_delta_each(events: list[Event]) -> list[Event]:
    """The events with adjacent deltas joined."""
    joined: list[Event] = []
    for event in events:
        if "delta" in event and joined and joined[-1]["type"] == event["type"]:
            joined[-1] = joined[-1] | {
                name: joined[-1][name] + event[name] for name in ("delta", "logprobs") if name in event
            }
        else:
            joined.append(event)
    return joined


CUTS = st.lists(st.integers(1, 6), min_size=1, max_size=8)
PARTS = st.lists(st.tuples(st.sampled_from(["text", "reasoning", "call"]), st.text("ab", max_size=20)), max_size=4)


@given(PARTS, CUTS, CUTS, st.integers(0, 60), st.booleans())
def test_whatever_a_reader_has_seen_it_ends_with_the_whole_answer(
    parts: list[tuple[str, str]], cuts: list[int], other_cuts: list[int], num_seen: int, has_logprobs: bool
):
    first, second = run_of(parts, cuts, has_logprobs), run_of(parts, other_cuts, has_logprobs)
    assert as_one_delta_each(spliced(first[:num_seen], second)) == as_one_delta_each(second)


@pytest.mark.parametrize(
    "other",
    [
        [("text", "The cat")],  # other text
        [("text", "Th")],  # less text
        [("reasoning", "The fox")],  # an item of another kind
        [("text", "The"), ("text", " fox")],  # the item ends elsewhere
    ],
)
def test_another_answer_is_refused(other: list[tuple[str, str]]):
    seen = run_of([("text", "The fox")], [2], has_logprobs=False)[:-1]
    with pytest.raises(OtherTextError):
        spliced(seen, run_of(other, [3], has_logprobs=False))


def test_the_events_of_the_first_run_stay_as_they_are():
    seen = run_of([("text", "The fox")], [2], has_logprobs=True)[:4]
    copied = [dict(event) for event in seen]
    spliced(seen, run_of([("text", "The fox")], [3], has_logprobs=True))
    assert seen == copied
