"""A server with two models whose engines are fakes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from llmstack_server.app import build_model_app
from llmstack_server.observability.metrics import ServerMetrics
from llmstack_server.options.adapter_options import AdapterModule
from llmstack_server.options.config import HTTPConfig, ServeConfig
from llmstack_server.options.models_file import ModelEntry, ModelsFile
from llmstack_server.options.secret import Secret, tenant_ids
from llmstack_server.pool.model_pool import ModelPool
from llmstack_server.pool.pooled_model import MemoryPlan, PooledModel
from llmstack_server.pool.routes import build_models_app
from llmstack_server.state.idle_sleep import IdleSleep
from llmstack_server.state.in_flight import InFlight
from llmstack_server.state.lifecycle import LifecycleState
from llmstack_server.state.server_state import ServerState
from llmstack_server.testing import FakeEngineClient, call, ready_state

GIB = 1 << 30
COMPLETION = {"prompt": "a", "max_tokens": 2}


class Host:
    """A model with a fake engine, which starts when `may_start` is set."""

    def __init__(
        self, names: tuple[str, ...], in_flight: InFlight, http: HTTPConfig, idle_sleep_s: float | None = None
    ) -> None:
        engine: Any = FakeEngineClient()
        self.state = ready_state(engine, http, names=names)
        if idle_sleep_s is not None:
            self.state.idle = IdleSleep(lambda: self.state.opened_engine, idle_sleep_s)
        self.state.in_flight = in_flight
        self.engine = engine
        application = build_model_app(self.state)
        self.app: Any = application
        self.routes = application.table.routes
        self.may_start = asyncio.Event()
        self.may_start.set()
        self.num_starts = 0
        self.adapters: list[AdapterModule] = []
        self.make_engine: Callable[[], Any] = FakeEngineClient

    async def start(self) -> None:
        self.num_starts += 1
        await self.may_start.wait()
        self.engine = self.make_engine()
        self.state.opened_engine = self.engine

    async def stop(self) -> None:
        self.state.opened_engine = None

    async def check(self) -> None:
        await self.state.engine.check_health()


class Setup:
    """A server with the models `small`, also known as `gpt-4o`, and `large`, of which both fit."""

    def __init__(self, http: HTTPConfig | None = None, idle_sleep_s: float | None = None) -> None:
        config = ServeConfig("small", ("small", "large"), http=http or HTTPConfig(has_live_page=False))
        self.state = ServerState(config, None, ServerMetrics(""))
        self.hosts = {
            names[0]: Host(names, self.state.in_flight, config.http, idle_sleep_s)
            for names in (("small", "gpt-4o"), ("large",))
        }
        models = [
            PooledModel(ModelEntry(name, name, GIB, None, 1, host.state.config.served_model_names[1:], {}),
                        MemoryPlan(0, 0, GIB), host)
            for name, host in self.hosts.items()
        ]  # fmt: skip
        self.pool = ModelPool(ModelsFile(2 * GIB, 6, 30.0, ()), models)
        for step in (LifecycleState.LOADING_MODEL, LifecycleState.INITIALIZING_ENGINE, LifecycleState.READY):
            self.state.lifecycle.advance(step)
        self.app = build_models_app(self.state, self.pool)

    async def complete(self, model: str | None, headers: dict[str, str] | None = None, **fields: Any) -> Any:
        body = COMPLETION | fields | ({} if model is None else {"model": model})
        return await call(self.app, "POST", "/v1/completions", body, headers)

    def tenant_of(self, key: str) -> str:
        """The tenant of an API key."""
        [tenant] = tenant_ids([Secret(key)], self.state.config.deployment_secret)
        return tenant

    async def statuses(self, key: str = "") -> dict[str, str]:
        headers = key_header(key) if key else None
        found = (await call(self.app, "GET", "/v1/models", headers=headers)).json()["data"]
        return {model["id"]: model["status"]["value"] for model in found}


def key_header(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}
