"""Merging of streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from llmstack_llm.outputs.request_output import RequestOutput
from llmstack_server.web.streams import close, merge


class Source:
    """A stream of numbered outputs that knows whether it was left."""

    def __init__(self, num_outputs: int, error: Exception | None = None) -> None:
        self.num_given = 0
        self.is_closed = False
        self._num_outputs = num_outputs
        self._error = error

    async def outputs(self) -> AsyncIterator[RequestOutput]:
        try:
            for index in range(self._num_outputs):
                await asyncio.sleep(0)
                self.num_given += 1
                yield RequestOutput(str(index), None, [])
            if self._error is not None:
                raise self._error
        finally:
            self.is_closed = True


@pytest.mark.parametrize("num_sources", [1, 2, 5])
async def test_every_output_of_every_stream_comes_in_the_order_of_its_stream(num_sources: int):
    sources = [Source(7) for _ in range(num_sources)]
    seen: dict[int, list[str]] = {}
    async for index, output in merge([source.outputs() for source in sources]):
        seen.setdefault(index, []).append(output.request_id)
    assert seen == {index: [str(k) for k in range(7)] for index in range(num_sources)}
    assert all(source.is_closed for source in sources)


@pytest.mark.parametrize("num_sources", [1, 3])
async def test_leaving_leaves_every_stream(num_sources: int):
    sources = [Source(100) for _ in range(num_sources)]
    merged = merge([source.outputs() for source in sources])
    await anext(merged)
    await close(merged)
    assert all(source.is_closed for source in sources)


async def test_an_error_of_one_stream_is_raised_and_leaves_the_others():
    sources = [Source(100), Source(2, ValueError("broken"))]
    with pytest.raises(ValueError, match="broken"):
        async for _ in merge([source.outputs() for source in sources]):
            pass
    assert all(source.is_closed for source in sources)


async def test_a_slow_reader_holds_the_streams_back():
    sources = [Source(100), Source(100)]
    merged = merge([source.outputs() for source in sources])
    await anext(merged)
    await asyncio.sleep(0.02)
    assert sum(source.num_given for source in sources) <= 6
    await close(merged)
