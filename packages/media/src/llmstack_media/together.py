"""Concurrent coroutines of one request; the first error ends the others."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

ResultT = TypeVar("ResultT")


async def run_together(work: Sequence[Coroutine[Any, Any, ResultT]]) -> list[ResultT]:
    """The results in order. If one fails, the others are cancelled and waited for, and its exception is raised."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
