"""Long loops on the event loop, with pauses in which other requests run."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import TypeVar

from llmstack_server.web.sse import encode_json, encode_string

Item = TypeVar("Item")

# One takes some 20 microseconds.
ITEMS_PER_STEP = 64


async def collected(items: Iterable[Item]) -> list[Item]:
    """The items of an iterator as a list. Other requests run after every few items and must not change its source."""
    found: list[Item] = []
    for item in items:
        found.append(item)
        if len(found) % ITEMS_PER_STEP == 0:
            await asyncio.sleep(0)
    return found


async def encoded(value: object, *, depth: int = 0) -> str:
    """JSON of an answer whose lists are long; other requests run after every few of their items.

    The encoder holds the interpreter lock, so a thread would not help. `depth`: Containers around the value.
    """
    if isinstance(value, dict):
        fields = [f"{encode_string(name)}:{await encoded(one, depth=depth + 1)}" for name, one in value.items()]
        return f"{{{','.join(fields)}}}"
    if not isinstance(value, list):
        return encode_json(value)
    pieces = []
    if depth <= 1 or len(value) <= ITEMS_PER_STEP:  # such as choices, each of which has long lists
        pieces = [await encoded(one, depth=depth + 1) for one in value]
    else:
        for start in range(0, len(value), ITEMS_PER_STEP):
            pieces.append(encode_json(value[start : start + ITEMS_PER_STEP])[1:-1])
            await asyncio.sleep(0)
    return f"[{','.join(pieces)}]"
