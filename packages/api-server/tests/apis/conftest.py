"""A server over a fake engine, for the tests of one API."""

from __future__ import annotations

from typing import Any

import pytest

from llmstack_server.app import build_app
from llmstack_server.state.server_state import ServerState
from llmstack_server.testing import FakeEngineClient, ready_state


@pytest.fixture
def engine() -> FakeEngineClient:
    return FakeEngineClient()


@pytest.fixture
def state(engine: FakeEngineClient) -> ServerState:
    return ready_state(engine)


@pytest.fixture
def app(state: ServerState) -> Any:
    return build_app(state)
