"""Long loops let other requests run."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmstack_llm import Logprob
from llmstack_server.chat.logprobs import CompletionLogprobs
from llmstack_server.web import pauses
from llmstack_server.web.pauses import ITEMS_PER_STEP, VALUES_PER_STEP, MadeItems, collected, encoded
from llmstack_server.web.sse import encode_json

Value = TypeVar("Value")


async def test_other_work_is_done_after_every_few_items():
    turns: list[int] = []

    async def note_turns() -> None:
        while True:
            turns.append(len(seen))
            await asyncio.sleep(0)

    seen: list[int] = []
    noting = asyncio.create_task(note_turns())
    count = 10 * ITEMS_PER_STEP
    assert await collected(seen.append(number) or number for number in range(count)) == list(range(count))  # type: ignore[func-returns-value]
    noting.cancel()
    assert max(later - earlier for earlier, later in zip([0, *turns], turns, strict=False)) <= ITEMS_PER_STEP
    assert len(turns) >= count // ITEMS_PER_STEP


async def turns_during(work: Coroutine[Any, Any, Value]) -> tuple[Value, int]:
    """What the work returns, and the turns of the event loop that other work had meanwhile."""
    num_turns = 0

    async def count() -> None:
        nonlocal num_turns
        while True:
            num_turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    value = await work
    counting.cancel()
    return value, num_turns


async def test_long_lists_of_an_answer_are_encoded_in_pieces():
    entries = [{"token": f'"{number}\\é', "top": [number / 3, None]} for number in range(10 * ITEMS_PER_STEP + 1)]
    short = {"a": [], "b": [[], {}, [1, "x"]], "n": True, "": None, "é\n": 1.5}
    choices = [{"index": index, "logprobs": {"content": entries}} for index in range(ITEMS_PER_STEP + 1)]
    whole = {"choices": [*choices, {"logprobs": None}], **short}
    parts, num_turns = await turns_during(encoded(whole))
    assert b"".join(parts).decode() == encode_json(whole)
    assert num_turns >= len(choices) * (len(entries) * 5 // VALUES_PER_STEP)


@given(st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=9) | st.dictionaries(st.text(max_size=3), inner, max_size=9),
))  # fmt: skip
async def test_any_answer_is_encoded_to_the_same_bytes(value: object) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        for name, size in (("VALUES_PER_STEP", 4), ("ITEMS_PER_STEP", 3), ("_PART_BYTES", 8)):
            monkeypatch.setattr(pauses, name, size)
        assert b"".join(await encoded(value)) == encode_json(value).encode()


async def test_items_that_are_made_late_are_those_of_a_list() -> None:
    rows = [[number / 7, -number] for number in range(3 * ITEMS_PER_STEP)]
    made = {"data": MadeItems(len(rows), rows.__getitem__), "none": MadeItems(0, rows.__getitem__), "index": 3}
    parts, num_turns = await turns_during(encoded(made))
    assert b"".join(parts).decode() == encode_json({"data": rows, "none": [], "index": 3})
    assert num_turns >= len(rows)


async def test_log_probabilities_of_a_long_text_are_built_in_pieces():
    token_ids = list(range(5 * ITEMS_PER_STEP + 3))
    positions = [None, *({one: Logprob(-0.5, 1, f"t{one}")} for one in token_ids[1:])]
    texts = [f"t{one}" for one in token_ids]
    found, num_turns = await turns_during(CompletionLogprobs(1).build_whole(token_ids, positions, texts))
    assert found == CompletionLogprobs(1).build(token_ids, positions, texts)
    assert num_turns >= len(token_ids) // ITEMS_PER_STEP
