"""A bounded queue and requests whose media are still being decoded: they are none of the queue yet."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from llm_helpers.engines import make

from llmstack_llm import media_door
from llmstack_llm.async_llm import AsyncLLM
from llmstack_llm.testing import FakeEngineCoreClient
from llmstack_types import PoolingParams, SamplingParams, ServerOverloadedError


class Decoding:
    """Stands for what decodes: all items come when `may_end` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_begun = self.num_released = 0
        self.may_end = asyncio.Event()
        monkeypatch.setattr(media_door, "prepare_all", self._prepare)

    async def _prepare(self, placed: object) -> Any:
        self.num_begun += 1
        await self.may_end.wait()
        return SimpleNamespace(items=(), release=self._release)

    def _release(self) -> None:
        self.num_released += 1


def with_media(llm: AsyncLLM, name: str) -> None:
    """Every prompt has an item from now on."""
    admit = getattr(llm.input_processor, name)

    async def admitted(*arguments: Any, **fields: Any) -> Any:
        return dataclasses.replace(await admit(*arguments, **fields), placed=(object(),))

    setattr(llm.input_processor, name, admitted)


@pytest.mark.parametrize("is_pooling", [False, True], ids=["generate", "encode"])
async def test_a_full_queue_refuses_what_was_decoded_meanwhile(
    folder: Path, client: FakeEngineCoreClient, monkeypatch: pytest.MonkeyPatch, is_pooling: bool
) -> None:
    client.step_delay_s = 0.05
    llm, decoding = make(folder, client, max_num_queued_reqs=1), Decoding(monkeypatch)
    with_media(llm, "admit_pooling_async" if is_pooling else "admit_async")

    async def ask(request_id: str) -> int:
        if is_pooling:
            return len([one async for one in llm.encode("ab", PoolingParams(), request_id)])
        return len([one async for one in llm.generate("ab", SamplingParams(max_tokens=3), request_id)])

    asked = [asyncio.create_task(ask(request_id)) for request_id in "abc"]
    for _ in range(1000):  # until all have passed the first check
        await asyncio.sleep(0)
    assert decoding.num_begun == len(asked)
    decoding.may_end.set()
    first, *others = await asyncio.gather(*asked, return_exceptions=True)
    assert isinstance(first, int)
    assert [type(one) for one in others] == [ServerOverloadedError, ServerOverloadedError]
    assert decoding.num_released == 3
    await llm.shutdown()
