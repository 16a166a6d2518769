"""The routes of a server with several models, and those to each of them."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import replace
from typing import Final, TypedDict

from fastapi import Request
from starlette.responses import JSONResponse, Response

from llmstack_server import server_version
from llmstack_server.apis.ollama.errors import OLLAMA_ERRORS
from llmstack_server.apis.ollama.models import COMPATIBLE_VERSION, model_tags, running_models
from llmstack_server.apis.ollama.objects import OllamaModels, OllamaRunningModels, OllamaVersion
from llmstack_server.apis.openai.models import MODEL, MODELS, MODELS_WITH_SLASH, model_object
from llmstack_server.app import make_app
from llmstack_server.app.application import Application
from llmstack_server.app.chat_page import add_chat_page
from llmstack_server.app.docs_page import add_docs_routes
from llmstack_server.app.routes import add_process_routes, set_gauges
from llmstack_server.app.session_routes import add_session_routes
from llmstack_server.observability.metrics import CONTENT_TYPE
from llmstack_server.observability.metrics_merge import Snapshot
from llmstack_server.pool.dispatch import ModelResponse, model_of, visible_models
from llmstack_server.pool.model_pool import ModelPool
from llmstack_server.pool.pool_metrics import PoolMetrics
from llmstack_server.pool.pooled_model import PooledModel
from llmstack_server.state.server_state import ServerState
from llmstack_server.web.api_types import Load, Status
from llmstack_server.web.clients import current_client
from llmstack_server.web.errors import engine_unavailable
from llmstack_server.web.middleware import health_body
from llmstack_server.web.routes import Content, DeclaredRoute, Endpoint, Key, Needs, Router, RouteSpec

# Pages that know one model alone.
_LEFT_OUT: Final = ("/live", "/live/events", "/v1/models/")


class ModelInfo(TypedDict):
    """A model with the memory that it counts with."""

    name: str
    status: str
    memory_bytes: int
    charged_bytes: int
    num_loads: int
    num_evictions: int
    load_s: float
    pids: list[int]


class ModelsInfo(TypedDict):
    """The models of a server, and the memory that they share."""

    version: str
    state: str
    memory_bytes: int
    charged_bytes: int
    models: list[ModelInfo]


def build_models_app(state: ServerState, pool: ModelPool) -> Application:
    """The application before all models of a server; `state` is its own, and has no engine."""
    router = Router()
    state.metrics.add(PoolMetrics(pool, lambda: visible_models(pool)))
    _add_health_routes(router, state)
    add_process_routes(router)
    _add_server_routes(router, state, pool)
    _add_model_routes(router, pool)
    _add_ollama_routes(router, pool)
    # A session may have turns of several models, all under one name.
    add_session_routes(router, state, lambda: (one.host.state for one in visible_models(pool) if one.is_loaded))
    http = state.config.http
    if http.has_docs:
        add_docs_routes(router, http)
    if http.has_chat_page:
        add_chat_page(router, http)
    own = {getattr(route, "path", "") for route in router.routes}
    _add_routes_of_models(router, state, pool, own.union(_LEFT_OUT))
    return make_app(state, router, has_several_models=True)


def _add_health_routes(router: Router, state: ServerState) -> None:
    @router.declare(RouteSpec("GET HEAD", "/health", Status, needs=Needs.NOTHING, key=Key.UNUSED))
    async def health() -> Response:
        """200 while requests are taken or drained, whichever models are loaded."""
        return _health(state, is_healthy=state.lifecycle.is_ready or state.lifecycle.is_stopping)

    @router.declare(RouteSpec("GET HEAD", "/ready", Status, needs=Needs.NOTHING, key=Key.UNUSED))
    async def ready() -> Response:
        """200 while new requests are accepted."""
        return _health(state, is_healthy=state.lifecycle.is_ready)


def _health(state: ServerState, *, is_healthy: bool) -> Response:
    current = str(state.lifecycle.state)
    if is_healthy:
        return JSONResponse({"status": current})
    answer = engine_unavailable(f"The server is not ready: {current}.")
    return JSONResponse(health_body(answer, current), status_code=503, headers=dict(answer.headers))


def _add_server_routes(router: Router, state: ServerState, pool: ModelPool) -> None:
    metrics_key = Key.UNUSED if state.config.http.has_open_metrics else Key.REQUIRED

    @router.declare(RouteSpec("GET HEAD", "/metrics", Content.TEXT, needs=Needs.NOTHING, key=metrics_key))
    async def metrics() -> Response:
        """Metrics of the models that the key may use, by their names, as Prometheus text."""
        state.metrics.set_lifecycle_state(str(state.lifecycle.state))
        snapshots = [_snapshot(model) for model in visible_models(pool)]
        text = state.metrics.render(snapshots, is_operator=current_client.get().is_operator)
        return Response(text, media_type=CONTENT_TYPE)

    @router.declare(RouteSpec("GET HEAD", "/load", Load, needs=Needs.NOTHING))
    async def load() -> Response:
        """The number of requests in flight, of all models."""
        return JSONResponse({"server_load": state.in_flight.count})

    @router.declare(RouteSpec("GET HEAD", "/server_info", ModelsInfo, needs=Needs.NOTHING))
    async def info() -> Response:
        """The models that the key may use, and the memory that they share."""
        models = [_info(model) for model in visible_models(pool)]
        found: ModelsInfo = {
            "version": server_version(), "state": str(state.lifecycle.state), "memory_bytes": pool.memory_bytes,
            "charged_bytes": sum(model["charged_bytes"] for model in models), "models": models,
        }  # fmt: skip
        return JSONResponse(found)


def _info(model: PooledModel) -> ModelInfo:
    engine = model.host.state.opened_engine
    return {
        "name": model.name, "status": str(model.status), "memory_bytes": model.entry.memory_bytes,
        "charged_bytes": model.charged_bytes, "num_loads": model.num_loads, "num_evictions": model.num_evictions,
        "load_s": round(model.load_s, 3), "pids": [] if engine is None else [one.pid for one in engine.engines],
    }  # fmt: skip


def _snapshot(model: PooledModel) -> Snapshot:
    """The metrics of a model, all of them under its name."""
    state = model.host.state
    set_gauges(state)
    snapshot = state.metrics.snapshot()
    for family in snapshot:
        for sample in family[4]:
            sample[1] = {"model_name": state.served_model_name, **sample[1]}
    return snapshot


def _add_model_routes(router: Router, pool: ModelPool) -> None:
    @router.declare(MODELS_WITH_SLASH)
    @router.declare(MODELS)
    async def models() -> Response:
        """Lists the models that the key may use, with their states."""
        named = [
            (model, name)
            for model in visible_models(pool)
            for name in (model.name, *model.entry.aliases, *(one.name for one in model.host.adapters))
        ]
        return JSONResponse({"object": "list", "data": [_model_object(model, name) for model, name in named]})

    @router.declare(MODEL)
    async def model(model: str) -> Response:
        """Returns one model with its state."""
        return JSONResponse(_model_object(model_of(pool, model), model))


def _model_object(model: PooledModel, name: str) -> dict[str, object]:
    return {**model_object(model.host.state, name, model.adapter(name)), "status": {"value": str(model.status)}}


def _add_ollama_routes(router: Router, pool: ModelPool) -> None:
    @router.declare(RouteSpec(
        "GET HEAD", "/api/tags", OllamaModels, tag="Ollama", needs=Needs.NOTHING, errors=OLLAMA_ERRORS
    ))  # fmt: skip
    async def tags() -> Response:
        """Lists the models that the key may use."""
        return JSONResponse(model_tags(_states(visible_models(pool))))

    @router.declare(RouteSpec(
        "GET HEAD", "/api/ps", OllamaRunningModels, tag="Ollama", needs=Needs.NOTHING, errors=OLLAMA_ERRORS
    ))  # fmt: skip
    async def running() -> Response:
        """Lists the models that are in memory."""
        return JSONResponse(running_models(_states(model for model in visible_models(pool) if model.is_loaded)))

    @router.declare(RouteSpec(
        "GET HEAD", "/api/version", OllamaVersion, tag="Ollama", needs=Needs.NOTHING, errors=OLLAMA_ERRORS
    ))  # fmt: skip
    async def ollama_version() -> Response:
        """The version of Ollama whose API this is."""
        return JSONResponse({"version": COMPATIBLE_VERSION})


def _states(models: Iterable[PooledModel]) -> list[ServerState]:
    return [model.host.state for model in models]


def _add_routes_of_models(router: Router, state: ServerState, pool: ModelPool, own: set[str]) -> None:
    """Adds the routes that a model has and the server has not; some models have some of them alone."""
    seen = set[tuple[str, str]]()
    for route, spec in (found for model in pool.models for found in model.host.routes):
        if not isinstance(route, DeclaredRoute) or (spec.methods, spec.path) in seen or spec.path in own:
            continue
        seen.add((spec.methods, spec.path))
        # What waits and resumes is behind the choice of the model, and so is what needs an engine.
        outer = replace(spec, needs=min(spec.needs, Needs.ENGINE), waits=False, is_resumable=False)
        endpoint = _to_model(pool, state, spec, route.endpoint)
        router.declare(outer, route.summary)(endpoint)


def _to_model(pool: ModelPool, state: ServerState, spec: RouteSpec, endpoint: Endpoint) -> Endpoint:
    @functools.wraps(endpoint)
    async def answer(*_: Request, **__: object) -> Response:
        return ModelResponse(pool, state, spec)

    return answer
