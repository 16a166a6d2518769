"""Too long conversations lose their oldest turns, and no more of them than needed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmstack_llm import request_errors
from llmstack_server.responses.truncation import prepare_newest_turns
from llmstack_types import InvalidRequestError


class Context:
    """Takes conversations of so many characters."""

    def __init__(self, size: int) -> None:
        self._size = size
        self.num_attempts = 0

    async def prepare(self, messages: Sequence[dict[str, Any]]) -> str:
        self.num_attempts += 1
        text = "".join(message["content"] for message in messages)
        if len(text) > self._size:
            raise request_errors.context_length_exceeded("messages", self._size, len(text))
        return text


def conversation(turns: Sequence[str], system: str = "") -> list[dict[str, Any]]:
    messages = [{"role": "system", "content": system}] if system else []
    for turn in turns:
        messages += [{"role": "user", "content": turn}, {"role": "assistant", "content": "!"}]
    return messages


async def test_what_fits_is_prepared_once():
    context = Context(10)
    assert await prepare_newest_turns(conversation(["ab", "cd"], "S"), context.prepare) == "Sab!cd!"
    assert context.num_attempts == 1


async def test_the_system_and_the_last_turn_stay():
    assert await prepare_newest_turns(conversation(["abcdef", "cd"], "S"), Context(4).prepare) == "Scd!"
    with pytest.raises(InvalidRequestError, match="maximum context length"):
        await prepare_newest_turns(conversation(["ab", "cdefg"], "S"), Context(4).prepare)


async def test_other_errors_are_no_reason_to_cut():
    async def refuse(messages: Sequence[dict[str, Any]]) -> str:
        raise request_errors.invalid_value("messages", "no")

    with pytest.raises(InvalidRequestError, match="no"):
        await prepare_newest_turns(conversation(["a", "b"]), refuse)


@given(st.lists(st.text("x", min_size=1, max_size=5), min_size=1, max_size=40), st.integers(1, 60))
async def test_no_turn_is_lost_that_would_fit(turns: list[str], size: int):
    context = Context(size)
    ends = ["".join(f"{turn}!" for turn in turns[start:]) for start in range(len(turns))]
    fitting = [end for end in ends if len(end) <= size]
    if not fitting:
        with pytest.raises(InvalidRequestError):
            await prepare_newest_turns(conversation(turns), context.prepare)
        return
    assert await prepare_newest_turns(conversation(turns), context.prepare) == fitting[0]
    assert context.num_attempts <= 8
