"""Merging and closing of streams of outputs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import TypeVar

Item = TypeVar("Item")


async def merge(streams: Sequence[AsyncIterator[Item]]) -> AsyncIterator[tuple[int, Item]]:
    """The outputs of several streams as they come, each with the index of its stream.

    Bounded: a stream continues only when its last output was consumed. Closing the iterator closes every stream.
    """
    if len(streams) == 1:
        try:
            async for output in streams[0]:
                yield 0, output
        finally:
            await close(streams[0])
        return
    queue: asyncio.Queue[tuple[int, Item | Exception | None]] = asyncio.Queue(maxsize=len(streams))
    pumps = [asyncio.create_task(_pump(index, stream, queue)) for index, stream in enumerate(streams)]
    try:
        num_open = len(streams)
        while num_open:
            index, item = await queue.get()
            if item is None:
                num_open -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield index, item
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _pump(
    index: int, stream: AsyncIterator[Item], queue: asyncio.Queue[tuple[int, Item | Exception | None]]
) -> None:
    last: Exception | None = None
    try:
        async for output in stream:
            await queue.put((index, output))
    except Exception as error:  # noqa: BLE001 (whatever it is, the reader of the queue raises it)
        last = error
    finally:
        await close(stream)
    await queue.put((index, last))


async def close(stream: object) -> None:
    """Closes a stream now, which aborts its request, rather than when it is garbage-collected."""
    if isinstance(stream, AsyncGenerator):
        await stream.aclose()
