"""Waiting for conditions without an event of their own, and the states of processes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path


async def wait_until(condition: Callable[[], object], timeout_s: float = 60.0) -> None:
    """Returns once `condition` holds; raises TimeoutError."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 (any condition: there is no event to wait for)
            await asyncio.sleep(0.01)


def eventually(condition: Callable[[], bool], timeout_s: float = 20.0) -> bool:
    """Whether `condition` comes to hold, for tests without an event loop."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.01)
    return True


def is_running(pid: int) -> bool:
    """Alive, and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
