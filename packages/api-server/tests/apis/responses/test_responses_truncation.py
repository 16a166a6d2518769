"""Too long conversations lose their oldest turns, and no more of them than needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmstack_llm import request_errors
from llmstack_server.apis.responses.truncation import submit_newest_turns
from llmstack_server.chat.prepare import SubmittedChat
from llmstack_types import InvalidRequestError


class Context:
    """Takes conversations of so many characters."""

    def __init__(self, size: int) -> None:
        self._size = size
        self.num_attempts = 0
        self.open_texts: set[str] = set()

    async def submit(self, messages: Sequence[Mapping[str, Any]]) -> Any:
        self.num_attempts += 1
        text = "".join(message["content"] for message in messages)
        if len(text) > self._size:
            raise request_errors.context_length_exceeded("messages", self._size, len(text))
        self.open_texts.add(text)
        return SubmittedChat(Outputs(self, text), None)  # type: ignore[arg-type]  # closed, never read


class Outputs:
    """Outputs of a submitted conversation."""

    def __init__(self, context: Context, text: str) -> None:
        self.text = text
        self._context = context

    async def aclose(self) -> None:
        self._context.open_texts.remove(self.text)


async def fitting_text(messages: Sequence[Mapping[str, Any]], context: Context) -> str:
    chat: Any = await submit_newest_turns(messages, context.submit)
    assert context.open_texts == {chat.outputs.text}  # shorter ones are closed
    return str(chat.outputs.text)


def conversation(turns: Sequence[str], system: str = "") -> list[dict[str, Any]]:
    messages = [{"role": "system", "content": system}] if system else []
    for turn in turns:
        messages += [{"role": "user", "content": turn}, {"role": "assistant", "content": "!"}]
    return messages


async def test_what_fits_is_submitted_once():
    context = Context(10)
    assert await fitting_text(conversation(["ab", "cd"], "S"), context) == "Sab!cd!"
    assert context.num_attempts == 1


async def test_the_system_and_the_last_turn_stay():
    assert await fitting_text(conversation(["abcdef", "cd"], "S"), Context(4)) == "Scd!"
    with pytest.raises(InvalidRequestError, match="maximum context length"):
        await submit_newest_turns(conversation(["ab", "cdefg"], "S"), Context(4).submit)


async def test_other_errors_are_no_reason_to_cut():
    async def refuse(messages: Sequence[Mapping[str, Any]]) -> Any:
        raise request_errors.invalid_value("messages", "no")

    with pytest.raises(InvalidRequestError, match="no"):
        await submit_newest_turns(conversation(["a", "b"]), refuse)


@given(st.lists(st.text("x", min_size=1, max_size=5), min_size=1, max_size=40), st.integers(1, 60))
async def test_no_turn_is_lost_that_would_fit(turns: list[str], size: int):
    context = Context(size)
    ends = ["".join(f"{turn}!" for turn in turns[start:]) for start in range(len(turns))]
    fitting = [end for end in ends if len(end) <= size]
    if not fitting:
        with pytest.raises(InvalidRequestError):
            await submit_newest_turns(conversation(turns), context.submit)
        return
    assert await fitting_text(conversation(turns), context) == fitting[0]
    assert context.num_attempts <= 8
