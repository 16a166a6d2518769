"""Long loops let other requests run."""

from __future__ import annotations

import asyncio

from llmstack_server.web.pauses import ITEMS_PER_STEP, collected


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
