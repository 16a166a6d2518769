"""A server of responses over a scripted engine, and the official client."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx2
import openai
import pytest

from llmstack_server.app import build_app
from llmstack_server.state.server_state import ServerState
from llmstack_server.testing import FakeEngineClient, ready_state


@pytest.fixture
def engine() -> FakeEngineClient:
    return FakeEngineClient()


@pytest.fixture
def state(engine: FakeEngineClient) -> ServerState:
    return ready_state(engine, names=("fake", "alias"))


@pytest.fixture
def app(state: ServerState) -> Any:
    return build_app(state)


@pytest.fixture
async def client(app: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    http = httpx2.AsyncClient(transport=httpx2.ASGITransport(app))
    async with openai.AsyncOpenAI(
        base_url="http://localhost/v1", api_key="none", max_retries=0, http_client=http
    ) as made:
        yield made
