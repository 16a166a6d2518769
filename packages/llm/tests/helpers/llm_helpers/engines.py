"""Asynchronous front ends over a scripted engine core, and what they give."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from llmstack_llm.async_llm import AsyncLLM
from llmstack_llm.model.config import load_model_config
from llmstack_llm.outputs.request_output import RequestOutput
from llmstack_llm.outputs.stream import GenerationStream
from llmstack_llm.testing import FakeEngineCoreClient
from llmstack_llm.text.tokenizer import load_tokenizer
from llmstack_types import (
    SamplingParams,
)


def make(folder: Path, client: FakeEngineCoreClient, **options: Any) -> AsyncLLM:
    return AsyncLLM(load_model_config(str(folder)), client, load_tokenizer(folder), **options)


async def first_request(client: FakeEngineCoreClient) -> None:
    """Waits until the engine core has been sent something."""
    for _ in range(10_000):
        if client.added:
            return
        await asyncio.sleep(0)
    pytest.fail("nothing was sent")


async def collect(llm: AsyncLLM, prompt: Any, request_id: str, **fields: Any) -> list[RequestOutput]:
    return [output async for output in llm.generate(prompt, SamplingParams(**fields), request_id)]


async def collected(stream: GenerationStream) -> list[RequestOutput]:
    async with stream:
        return [output async for output in stream]
