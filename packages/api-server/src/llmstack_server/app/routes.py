"""All routes of a server, and those about the server itself."""

from __future__ import annotations

from dataclasses import replace

from starlette.responses import JSONResponse, Response

from llmstack_server import server_version
from llmstack_server.apis.anthropic.routes import add_anthropic_routes
from llmstack_server.apis.audio.routes import add_audio_routes
from llmstack_server.apis.decisions.routes import add_decision_routes
from llmstack_server.apis.llama_cpp.routes import add_llama_cpp_routes
from llmstack_server.apis.ollama.routes import add_ollama_routes
from llmstack_server.apis.openai.routes import add_openai_routes
from llmstack_server.apis.pooling.routes import add_pooling_routes
from llmstack_server.apis.realtime.routes import add_realtime_route
from llmstack_server.apis.responses.routes import add_responses_routes
from llmstack_server.app.adapter_routes import add_adapter_routes
from llmstack_server.app.chat_page import add_chat_page
from llmstack_server.app.docs_page import add_docs_routes
from llmstack_server.app.explain_routes import add_explanation_route
from llmstack_server.app.invocations import add_invocations_route
from llmstack_server.app.live_page import add_live_page
from llmstack_server.app.log_routes import add_log_routes
from llmstack_server.app.pause_routes import add_pause_routes
from llmstack_server.app.profile_routes import add_profile_routes
from llmstack_server.app.reload_routes import add_reload_routes
from llmstack_server.app.server_info import server_info
from llmstack_server.app.session_routes import add_session_routes
from llmstack_server.app.sleep_routes import add_sleep_routes
from llmstack_server.app.steps import add_steps_routes
from llmstack_server.app.stream_routes import add_stream_routes
from llmstack_server.app.weight_routes import add_weight_routes
from llmstack_server.observability.metrics import CONTENT_TYPE
from llmstack_server.options.named_objects import load_named
from llmstack_server.state.lifecycle import LifecycleState
from llmstack_server.state.queue_wait import predict_wait
from llmstack_server.state.server_state import ServerState
from llmstack_server.web.api_types import Load, ServerInfo, Status, Version
from llmstack_server.web.clients import current_client
from llmstack_server.web.errors import HTTPError, engine_unavailable
from llmstack_server.web.middleware import health_body
from llmstack_server.web.routes import Content, Key, Needs, Router, RouteSpec
from llmstack_types import Control, EngineDeadError


def build_router(state: ServerState) -> Router:
    """A router with every route that the configuration enables."""
    router = Router()
    state.request_ids.share(state.peers)
    state.adapters.share(state.peers, lambda: None if state.opened_engine is None else state.engine.adapters)
    key_file = state.config.http.answers.receipt_key_file
    if key_file is not None:
        from llmstack_server.web.receipts import open_signer  # late: most servers sign nothing

        state.receipts = open_signer(key_file)
    _add_health_routes(router, state)
    add_process_routes(router)
    _add_server_routes(router, state)
    add_openai_routes(router, state)
    add_pooling_routes(router, state)
    add_audio_routes(router, state)
    add_realtime_route(router, state)
    if state.config.http.state_dir is not None and not state.is_one_of_several:  # files belong to no model
        from llmstack_server.apis.batches.routes import add_batch_routes  # late: SQLite and the parser of forms

        add_batch_routes(router, state)
    add_responses_routes(router, state)
    add_anthropic_routes(router, state)
    add_ollama_routes(router, state)
    add_llama_cpp_routes(router, state)
    add_decision_routes(router, state)
    add_invocations_route(router, state)
    add_steps_routes(router, state)
    add_explanation_route(router, state)
    add_session_routes(router, state)
    add_stream_routes(router, state)
    if state.config.http.has_docs:
        add_docs_routes(router, state.config.http)
    if state.config.http.has_chat_page:
        add_chat_page(router, state.config.http)
        add_live_page(router, state)
    for name in state.config.http.extra_routes:
        load_named("--extra-routes", name)(router, state)
    if state.config.http.enable_control_routes:
        _add_control_routes(router, state)
        add_pause_routes(router, state)
        add_log_routes(router, state)
        if state.config.processes.has_sleep_mode:
            add_sleep_routes(router, state)
        if state.config.engine.profiler_config is not None:
            add_profile_routes(router, state)
        if state.config.adapters.root is not None:
            add_adapter_routes(router, state, state.config.adapters.root)
        add_reload_routes(router, state)
        add_weight_routes(router, state)
    return router


def _add_health_routes(router: Router, state: ServerState) -> None:
    @router.declare(RouteSpec("GET HEAD", "/health", Status, needs=Needs.NOTHING, key=Key.UNUSED))
    async def health() -> Response:
        """200 once the engine can answer, and while running requests are drained."""
        return await _health(state, (LifecycleState.READY, LifecycleState.DRAINING))

    @router.declare(RouteSpec("GET HEAD", "/ready", Status, needs=Needs.NOTHING, key=Key.UNUSED))
    async def ready() -> Response:
        """200 while new requests are accepted and make progress."""
        if state.watchdog.is_engine_stuck:
            raise HTTPError(engine_unavailable("The server is stuck: the engine core finishes no steps."))
        if state.opened_engine is not None and state.opened_engine.is_recovering:
            raise HTTPError(engine_unavailable("The server is recovering: another engine core is being started."))
        return await _health(state, (LifecycleState.READY,))


async def _health(state: ServerState, healthy: tuple[LifecycleState, ...]) -> Response:
    current = state.lifecycle.reported_state
    if current in healthy:
        try:
            await state.engine.check_health()
        except EngineDeadError:
            current = LifecycleState.STOPPED
        else:
            body: dict[str, object] = {"status": str(current)}
            if state.idle is not None:
                body["sleep_level"] = state.engine.sleep_level
            return JSONResponse(body)
    answer = engine_unavailable(f"The server is not ready: {current}.")
    return JSONResponse(health_body(answer, str(current)), status_code=503, headers=dict(answer.headers))


def add_process_routes(router: Router) -> None:
    """Adds the routes about the process itself, whatever it serves: that it runs, and its version."""

    @router.declare(RouteSpec("GET HEAD POST", "/ping", Content.EMPTY, needs=Needs.NOTHING, key=Key.UNUSED))
    async def ping() -> Response:
        """200 while the process runs."""
        return Response(status_code=200)

    @router.declare(RouteSpec("GET HEAD", "/version", Version, needs=Needs.NOTHING))
    async def version() -> Response:
        """The version of the server package."""
        return JSONResponse({"version": server_version()})


def _add_server_routes(router: Router, state: ServerState) -> None:
    metrics_key = Key.UNUSED if state.config.http.has_open_metrics else Key.REQUIRED

    @router.declare(RouteSpec("GET HEAD", "/metrics", Content.TEXT, needs=Needs.NOTHING, key=metrics_key))
    async def metrics() -> Response:
        """Metrics of all processes of the server, as Prometheus text."""
        state.metrics.set_lifecycle_state(str(state.lifecycle.state))
        set_gauges(state)
        peers, is_operator = await state.ask_peers("metrics"), current_client.get().is_operator
        return Response(state.metrics.render(peers, is_operator=is_operator), media_type=CONTENT_TYPE)

    @router.declare(RouteSpec("GET HEAD", "/load", Load, needs=Needs.NOTHING))
    async def load() -> Response:
        """The number of generating requests in flight, in all processes of the server."""
        return JSONResponse({"server_load": state.in_flight.count + sum(await state.ask_peers("load"))})

    @router.declare(RouteSpec("GET HEAD", "/server_info", ServerInfo, needs=Needs.NOTHING))
    async def info() -> Response:
        """The configuration, state and versions; read-only, without secrets."""
        return JSONResponse(server_info(state))


def set_gauges(state: ServerState) -> None:
    """Sets the metrics that have the value of the moment they are asked for."""
    state.metrics.set_sleep_level(0 if state.opened_engine is None else state.opened_engine.sleep_level)
    if state.opened_engine is not None:
        state.metrics.set_adapter_use(state.config.engine.max_loras, *state.opened_engine.adapter_use())
    queue = state.queue.state()
    state.metrics.set_queue(predict_wait(replace(queue, quantum=0), 0, ""), queue.tokens_per_s)


def _add_control_routes(router: Router, state: ServerState) -> None:
    @router.declare(RouteSpec(
        "POST", "/reset_prefix_cache", Content.EMPTY, needs=Needs.ENGINE, is_for_operators=True
    ))  # fmt: skip
    async def reset_prefix_cache() -> Response:
        """Empties the prefix cache; refused while requests are running."""
        if await state.engine.control(Control.RESET_PREFIX_CACHE):
            return Response(status_code=200)
        raise HTTPError(engine_unavailable("The prefix cache is in use: requests are running."))
