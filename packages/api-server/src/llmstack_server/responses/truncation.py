"""`truncation: auto`: a conversation that is too long loses its oldest turns."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from llmstack_types import InvalidRequestError

TOO_LONG = "context_length_exceeded"

Message = Mapping[str, Any]
Prepared = TypeVar("Prepared")


async def prepare_newest_turns(
    messages: Sequence[Message], prepare: Callable[[Sequence[Message]], Awaitable[Prepared]]
) -> Prepared:
    """What `prepare` makes of the longest end of the conversation that fits the context.

    Cuts are before what a user says, so that a call stays with its result; what the system says at the beginning and
    the last turn stay. A conversation of n turns is prepared about log2(n) times.

    Raises:
        InvalidRequestError: As `prepare`; `context_length_exceeded` where the last turn alone is too long.
    """
    try:
        return await prepare(messages)
    except InvalidRequestError as error:
        if error.code != TOO_LONG:
            raise
        fitting = await _longest_fitting(_shorter_ends(messages), prepare)
        if fitting is None:
            raise
        return fitting


async def _longest_fitting(
    ends: Sequence[Sequence[Message]], prepare: Callable[[Sequence[Message]], Awaitable[Prepared]]
) -> Prepared | None:
    """Of conversations from long to short the first that fits, by bisection."""
    fitting: Prepared | None = None
    low, high = 0, len(ends)
    while low < high:
        middle = (low + high) // 2
        try:
            fitting = await prepare(ends[middle])
        except InvalidRequestError as error:
            if error.code != TOO_LONG:
                raise
            low = middle + 1
        else:
            high = middle
    return fitting


def _shorter_ends(messages: Sequence[Message]) -> list[list[Message]]:
    """The conversation from its second turn on, from its third, and so on."""
    num_kept = 1 if messages[0]["role"] == "system" else 0
    starts = [index for index, message in enumerate(messages) if message["role"] == "user" and index > num_kept]
    return [[*messages[:num_kept], *messages[start:]] for start in starts]
