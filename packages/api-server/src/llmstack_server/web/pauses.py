"""Long loops on the event loop, with pauses in which other requests run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import Final, Generic, TypeVar

from llmstack_server.web.sse import encode_json, encode_string

Item = TypeVar("Item")

# One takes some 20 microseconds.
ITEMS_PER_STEP = 64
VALUES_PER_STEP: Final = 4096
"""Values that are encoded in one go: numbers take some 4 milliseconds."""
_CHARS_PER_VALUE: Final = 256
_PART_BYTES: Final = 1 << 18


class MadeItems(Generic[Item]):
    """A list for `encoded` whose items are made as they are encoded, each time by their number."""

    def __init__(self, length: int, make: Callable[[int], Item]) -> None:
        self._length, self._make = length, make

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, number: int) -> Item:
        return self._make(number)


async def collected(items: Iterable[Item]) -> list[Item]:
    """The items of an iterator as a list. Other requests run after every few items and must not change its source."""
    found: list[Item] = []
    for item in items:
        found.append(item)
        if len(found) % ITEMS_PER_STEP == 0:
            await asyncio.sleep(0)
    return found


async def encoded(value: object) -> list[bytes]:
    """JSON of an answer in parts, between which other requests run: each has a few thousand values at most.

    The encoder holds the interpreter lock, so a thread would not help.
    """
    if _num_values(value) <= VALUES_PER_STEP:  # as nearly every answer
        return [_bytes_of(encode_json(value))]
    return list(in_parts([_bytes_of(piece) async for piece in _pieces(value)]))


def in_parts(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """The same bytes in parts that are neither so small nor so large that sending them takes long."""
    part = bytearray()
    for piece in pieces:
        part += piece
        if len(part) >= _PART_BYTES:
            yield bytes(part)
            part.clear()
    if part:
        yield bytes(part)


def _bytes_of(text: str) -> bytes:
    return text.encode("utf-8", "replace")


async def _pieces(value: object) -> AsyncIterator[str]:
    """JSON in pieces; other requests run after each one with many values."""
    if _num_values(value) <= VALUES_PER_STEP:
        yield encode_json(value)
    elif isinstance(value, dict):
        for index, (name, one) in enumerate(value.items()):
            yield f"{',' if index else '{'}{encode_string(name)}:"
            async for piece in _pieces(one):
                yield piece
        yield "}"
    elif isinstance(value, list):
        async for piece in _pieces_of_list(value, max(map(_num_values, _some_of(value)))):
            yield piece
    elif isinstance(value, MadeItems):
        async for piece in _pieces_of_list(value, VALUES_PER_STEP):
            yield piece
    else:
        yield encode_json(value)
    await asyncio.sleep(0)


async def _pieces_of_list(values: list[object] | MadeItems[object], size: int) -> AsyncIterator[str]:
    """JSON of a list in pieces; its items have `size` values each."""
    step = VALUES_PER_STEP // size
    yield "["
    for start in range(0, len(values), max(step, 1)):
        yield "," if start else ""
        if step > 1 and isinstance(values, list):
            yield encode_json(values[start : start + step])[1:-1]
            await asyncio.sleep(0)
        else:
            async for piece in _pieces(values[start]):
                yield piece
    yield "]"


def _num_values(value: object) -> int:
    """About how many values there are to encode, of texts by their length."""
    if isinstance(value, str):
        return 1 + len(value) // _CHARS_PER_VALUE
    if isinstance(value, dict):
        return 1 + sum(map(_num_values, value.values()))
    if isinstance(value, MadeItems):
        return VALUES_PER_STEP + 1
    if not isinstance(value, list):
        return 1
    if len(value) <= ITEMS_PER_STEP:
        return 1 + sum(map(_num_values, value))
    return 1 + len(value) * max(map(_num_values, _some_of(value)))


def _some_of(values: list[object]) -> list[object]:
    """Items of a list that stand for the others: all of a short one."""
    return values if len(values) <= ITEMS_PER_STEP else [values[0], values[len(values) // 2], values[-1]]
