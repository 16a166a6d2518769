"""The events of a response that was begun again, after those of its first run."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from llmstack_server.apis.responses.output_items import Item

Event = dict[str, Any]

_DELTA = ".delta"


class OtherTextError(Exception):
    """The second run of a response differs from what its reader may have seen of the first."""


class EarlierEvents:
    """Follows a second run, and passes on what its reader cannot have seen yet.

    Both runs have the same text, cut into deltas at other places.
    """

    def __init__(self, events: Sequence[Event]) -> None:
        """`events`: Those of the first run."""
        self._left = deque(dict(event) for event in events)
        self._num_logprobs = 0  # of the first run's present text that the second one has not repeated
        self._has_text = False

    def rest_of(self, event: Event) -> Event | None:
        """The new part of the next event of the second run; None if there is none.

        Raises:
            OtherTextError: It is not as in the first run.
        """
        kind = str(event["type"])
        if kind.endswith(_DELTA):
            return self._rest_of_delta(event)
        self._has_text, self._num_logprobs = False, 0
        if not self._left:
            return event
        if _place(self._left.popleft()) != _place(event):
            raise OtherTextError
        return None

    def _rest_of_delta(self, event: Event) -> Event | None:
        text = str(event["delta"])
        if not self._has_text:
            self._has_text = True
            self._num_logprobs = self._count_logprobs(_place(event))
        while text and self._left:
            seen = self._left[0]
            num_chars = min(len(text), len(seen.get("delta", "")))
            if _place(seen) != _place(event) or text[:num_chars] != seen["delta"][:num_chars]:
                raise OtherTextError
            text, seen["delta"] = text[num_chars:], seen["delta"][num_chars:]
            if not seen["delta"]:
                self._left.popleft()
        rest = event | {"delta": text}
        if "logprobs" not in event:
            return rest if text else None
        num_seen = min(self._num_logprobs, len(event["logprobs"]))
        self._num_logprobs -= num_seen
        rest["logprobs"] = event["logprobs"][num_seen:]
        return rest if text or rest["logprobs"] else None

    def _count_logprobs(self, place: tuple[Any, ...]) -> int:
        """The deltas of the first run at this place; those without text are of no further use."""
        count = 0
        kept: deque[Event] = deque()
        while self._left and _place(self._left[0]) == place:
            seen = self._left.popleft()
            count += len(seen.get("logprobs", ()))
            if seen["delta"]:
                kept.append(seen)
        self._left.extendleft(reversed(kept))
        return count


def output_items(events: Sequence[Event]) -> list[Item]:
    """The output items that these events have begun."""
    return [event["item"] for event in events if event["type"] == "response.output_item.added"]


def _place(event: Event) -> tuple[Any, ...]:
    """The key of an event's place, which is the same in both runs."""
    item = event.get("item") or {}
    return event["type"], event.get("output_index"), event.get("item_id"), item.get("id"), item.get("type")
