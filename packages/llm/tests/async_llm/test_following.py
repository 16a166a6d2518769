"""Streams whose outputs are taken without a turn of the task that iterates over them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from llm_helpers.engines import collected

from llmstack_llm.async_llm import AsyncLLM
from llmstack_llm.outputs.request_output import RequestOutput
from llmstack_llm.requests import GenerationRequest
from llmstack_types import RequestOutputKind


@pytest.mark.parametrize("share", [0, 2, 3])
async def test_a_stream_is_whole_however_much_of_it_is_taken(llm: AsyncLLM, share: int):
    await llm.wait_until_ready()
    sampling = llm.check_sampling({"max_tokens": 40, "ignore_eos": True, "output_kind": RequestOutputKind.DELTA})
    async with await llm.submit(GenerationRequest("plain", "abcdefg", sampling)) as stream:
        expected = await collected(stream)

    def text_of(outputs: Sequence[RequestOutput]) -> str:
        return "".join(one.outputs[0].text for one in outputs)

    found, num_taken = list[RequestOutput](), 0

    def take(one: RequestOutput) -> bool:
        nonlocal num_taken
        if share and len(found) % share == 0:
            return False
        found.append(one)
        num_taken += 1
        return True

    async with await llm.submit(GenerationRequest("followed", "abcdefg", sampling)) as stream:
        async for one in stream:
            found.append(one)
            stream.follow(take)
    assert text_of(found) == text_of(expected)
    assert [one.finished for one in found] == [False] * (len(found) - 1) + [True]
    assert num_taken > 5
    assert llm.num_requests_in_flight == 0
