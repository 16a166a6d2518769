"""The routes: what each path calls, and what the OpenAPI document says about it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from llmstack_server.anthropic.routes import add_anthropic_routes
from llmstack_server.http.body import BodyLimits, read_json_object
from llmstack_server.http.docs_page import add_docs_routes
from llmstack_server.http.errors import HTTPError, engine_unavailable
from llmstack_server.http.metrics import CONTENT_TYPE
from llmstack_server.http.middleware import health_body
from llmstack_server.http.openapi import STREAM, error_responses, request_body
from llmstack_server.http.server_info import server_info
from llmstack_server.http.sleep_routes import add_sleep_routes
from llmstack_server.http.steps import add_steps_routes
from llmstack_server.lifecycle import LifecycleState
from llmstack_server.named_objects import load_named
from llmstack_server.openai.chat import prepare_chat
from llmstack_server.openai.completions import prepare_completion
from llmstack_server.openai.invocations import prepare_invocation
from llmstack_server.openai.models import check_model, model_list, model_object
from llmstack_server.openai.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from llmstack_server.openai.serving import GenerationResponse
from llmstack_server.openai.tokenization import detokenize, tokenize, tokenizer_info
from llmstack_server.pooling.routes import add_pooling_routes
from llmstack_server.responses.routes import add_responses_routes
from llmstack_server.state import ServerState
from llmstack_server.version import server_version
from llmstack_types import EngineDeadError


def build_router(state: ServerState) -> APIRouter:
    """All routes of one server."""
    router = APIRouter()
    _add_health_routes(router, state)
    _add_server_routes(router, state)
    _add_generation_routes(router, state)
    add_pooling_routes(router, state)
    add_responses_routes(router, state)
    add_anthropic_routes(router, state)
    add_steps_routes(router, state)
    if state.config.http.has_docs:
        add_docs_routes(router)
    for name in state.config.http.extra_routes:
        load_named("--extra-routes", name)(router, state)
    if state.config.http.enable_control_routes:
        _add_control_routes(router, state)
        if state.config.processes.has_sleep_mode:
            add_sleep_routes(router, state)
    return router


def _add_health_routes(router: APIRouter, state: ServerState) -> None:
    @router.head("/health", include_in_schema=False)
    @router.get("/health", responses=error_responses(503))
    async def health() -> Response:
        """200 once the engine can answer, and while running requests are drained."""
        return await _health(state, (LifecycleState.READY, LifecycleState.DRAINING))

    @router.get("/ready", responses=error_responses(503))
    async def ready() -> Response:
        """200 while new requests are taken, and get on."""
        if state.watchdog.is_engine_stuck:
            raise HTTPError(engine_unavailable("The server is stuck: the engine core finishes no steps."))
        if state.opened_engine is not None and state.opened_engine.is_recovering:
            raise HTTPError(engine_unavailable("The server is recovering: another engine core is being started."))
        return await _health(state, (LifecycleState.READY,))

    @router.post("/ping", include_in_schema=False)
    @router.get("/ping")
    async def ping() -> Response:
        """200 while the process lives."""
        return Response(status_code=200)


async def _health(state: ServerState, healthy: tuple[LifecycleState, ...]) -> Response:
    current = state.lifecycle.state
    if current in healthy:
        try:
            await state.engine.check_health()
        except EngineDeadError:
            current = LifecycleState.STOPPED
        else:
            return JSONResponse({"status": str(current)})
    answer = engine_unavailable(f"The server is not ready: {current}.")
    return JSONResponse(health_body(answer, str(current)), status_code=503, headers=dict(answer.headers))


def _add_server_routes(router: APIRouter, state: ServerState) -> None:
    @router.get("/v1/models")
    async def models() -> Response:
        """The served names."""
        return JSONResponse(model_list(state))

    @router.get("/v1/models/{model:path}", responses=error_responses(404))
    async def model(model: str) -> Response:
        """One served name."""
        return JSONResponse(model_object(state, check_model(state, model)))

    @router.get("/version")
    async def version() -> Response:
        """The server's version."""
        return JSONResponse({"version": server_version()})

    @router.get("/metrics")
    async def metrics() -> Response:
        """Prometheus text."""
        state.metrics.set_lifecycle_state(str(state.lifecycle.state))
        state.metrics.set_sleep_level(0 if state.opened_engine is None else state.opened_engine.sleep_level)
        return Response(state.metrics.render(await state.ask_peers("metrics")), media_type=CONTENT_TYPE)

    @router.get("/load")
    async def load() -> Response:
        """Generating requests in flight, in all processes of the server."""
        return JSONResponse({"server_load": state.in_flight.count + sum(await state.ask_peers("load"))})

    @router.get("/server_info")
    async def info() -> Response:
        """What is running; read only, no secrets."""
        return JSONResponse(server_info(state))


def _add_generation_routes(router: APIRouter, state: ServerState) -> None:
    errors = STREAM | error_responses(400, 401, 404, 413, 415, 500, 503)

    @router.post("/v1/completions", responses=errors, openapi_extra=request_body(CompletionRequest))
    async def completions() -> Response:
        """Continues one or several prompts."""
        return GenerationResponse(state, prepare_completion)

    @router.post("/v1/chat/completions", responses=errors, openapi_extra=request_body(ChatCompletionRequest))
    async def chat_completions() -> Response:
        """Answers a conversation."""
        return GenerationResponse(state, prepare_chat)

    @router.post("/invocations", responses=errors)
    async def invocations() -> Response:
        """Answers as the route does that the body is meant for."""
        return GenerationResponse(state, prepare_invocation)

    @router.post("/tokenize", responses=error_responses(400), openapi_extra=request_body(TokenizeRequest))
    async def tokenize_route(request: Request) -> Response:
        """Token ids of a prompt or of a conversation."""
        return await _answer_json(state, request, tokenize)

    @router.post("/detokenize", responses=error_responses(400), openapi_extra=request_body(DetokenizeRequest))
    async def detokenize_route(request: Request) -> Response:
        """Text of token ids."""
        return await _answer_json(state, request, detokenize)

    if state.config.http.has_tokenizer_info:

        @router.get("/tokenizer_info")
        async def tokenizer_info_route() -> Response:
            """The tokenizer's configuration."""
            return JSONResponse(await tokenizer_info(state))


def _add_control_routes(router: APIRouter, state: ServerState) -> None:
    @router.post("/reset_prefix_cache")
    async def reset_prefix_cache() -> Response:
        """Forgets cached prefixes; refused while requests are running."""
        if await state.engine.reset_prefix_cache():
            return Response(status_code=200)
        raise HTTPError(engine_unavailable("The prefix cache is in use: requests are running."))


async def _answer_json(
    state: ServerState, request: Request, answer: Callable[[ServerState, dict[str, Any]], Awaitable[dict[str, Any]]]
) -> Response:
    limits = BodyLimits(state.config.http.max_body_bytes, state.config.http.receive_timeout_s)
    return JSONResponse(await answer(state, await read_json_object(request.headers, request.receive, limits)))
