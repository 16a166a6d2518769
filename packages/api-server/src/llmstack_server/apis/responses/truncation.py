"""`truncation: auto`, which drops the oldest turns of a long conversation."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence

from llmstack_server.chat.prepare import SubmittedChat
from llmstack_types import InvalidRequestError

TOO_LONG = "context_length_exceeded"

Message = Mapping[str, object]
Submit = Callable[[Sequence[Message]], Awaitable[SubmittedChat]]


async def submit_newest_turns(messages: Sequence[Message], submit: Submit) -> SubmittedChat:
    """Submits the longest end of the conversation that fits the context.

    Cuts are before a user's message, so that a call stays with its result; system messages at the beginning and the
    last turn stay. A conversation of n turns is tried about log2(n) times.

    Raises:
        InvalidRequestError: As `submit`; `context_length_exceeded` where the last turn alone is too long.
    """
    try:
        return await submit(messages)
    except InvalidRequestError as error:
        if error.code != TOO_LONG:
            raise
        fitting = await _longest_fitting(_shorter_ends(messages), submit)
        if fitting is None:
            raise
        return fitting


async def _longest_fitting(ends: Sequence[Sequence[Message]], submit: Submit) -> SubmittedChat | None:
    """The first of some conversations, from long to short, that fits; by bisection."""
    fitting: SubmittedChat | None = None
    low, high = 0, len(ends)
    while low < high:
        middle = (low + high) // 2
        try:
            longer = await submit(ends[middle])
        except InvalidRequestError as error:
            if error.code != TOO_LONG:
                raise
            low = middle + 1
        else:
            if fitting is not None:
                await fitting.outputs.aclose()
            fitting, high = longer, middle
    return fitting


def _shorter_ends(messages: Sequence[Message]) -> list[list[Message]]:
    """The conversation without its first turn, without its first two, and so on."""
    num_kept = 1 if messages[0]["role"] == "system" else 0
    starts = [index for index, message in enumerate(messages) if message["role"] == "user" and index > num_kept]
    return [[*messages[:num_kept], *messages[start:]] for start in starts]
