"""A front end over an engine core that echoes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from llm_helpers.engines import make

from llmstack_llm.async_llm import AsyncLLM
from llmstack_llm.testing import FakeEngineCoreClient, write_model_folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_model_folder(tmp_path / "m")


@pytest.fixture
async def client() -> FakeEngineCoreClient:
    return FakeEngineCoreClient()


@pytest.fixture
async def llm(folder: Path, client: FakeEngineCoreClient) -> AsyncIterator[AsyncLLM]:
    made = make(folder, client)
    yield made
    await made.shutdown()
