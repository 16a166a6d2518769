"""The routes of Ollama's API."""

from __future__ import annotations

from fastapi import Request
from starlette.responses import JSONResponse, Response

from llmstack_server.apis.ollama.embed import prepare_embed, prepare_older_embed
from llmstack_server.apis.ollama.errors import OLLAMA_ERRORS
from llmstack_server.apis.ollama.generate import prepare_chat, prepare_generate
from llmstack_server.apis.ollama.models import COMPATIBLE_VERSION, model_tags, running_models, show_model
from llmstack_server.apis.ollama.objects import (
    OllamaChat,
    OllamaEmbedding,
    OllamaEmbeddings,
    OllamaGeneration,
    OllamaModels,
    OllamaRunningModels,
    OllamaShownModel,
    OllamaVersion,
)
from llmstack_server.apis.ollama.protocol import (
    ChatRequest,
    EmbedRequest,
    GenerateRequest,
    OlderEmbedRequest,
    ShowRequest,
)
from llmstack_server.state.server_state import ServerState
from llmstack_server.web.answers import endpoint
from llmstack_server.web.body import read_object
from llmstack_server.web.openapi import LINES
from llmstack_server.web.openapi_bodies import ANY, TEXT_LIST, RequestBody, array
from llmstack_server.web.routes import Needs, Router, RouteSpec

_TAG = "Ollama"


def add_ollama_routes(router: Router, state: ServerState) -> None:
    """`/api/chat`, `/api/generate`, `/api/embed`, and what clients ask of models."""
    _add_generation_routes(router, state)
    _add_embedding_routes(router, state)
    _add_model_routes(router, state)


def _add_generation_routes(router: Router, state: ServerState) -> None:
    turns = array({"type": "object", "required": ["role"], "properties": {"role": {"type": "string"}}})
    chat = RequestBody(ChatRequest, required={"messages": turns}, has_ranges=False)
    generate = RequestBody(GenerateRequest, required={"prompt": {"type": "string"}}, has_ranges=False)
    for path, answer, body, prepare, summary in (
        ("/api/chat", OllamaChat, chat, prepare_chat, "Continues a conversation"),
        ("/api/generate", OllamaGeneration, generate, prepare_generate, "Answers or continues a prompt"),
    ):
        spec = RouteSpec(
            "POST", path, answer, body=body, tag=_TAG, errors=OLLAMA_ERRORS,
            streams=True, stream_type=LINES, waits=True, takes_untyped=True,
        )  # fmt: skip
        router.declare(spec, summary)(endpoint(state, prepare))


def _add_embedding_routes(router: Router, state: ServerState) -> None:
    texts = RequestBody(EmbedRequest, required={"input": TEXT_LIST}, has_ranges=False)
    text = RequestBody(OlderEmbedRequest, required={"prompt": {"type": "string"}}, has_ranges=False)
    for path, answer, body, prepare, summary in (
        ("/api/embed", OllamaEmbeddings, texts, prepare_embed, "A vector for each of one or several texts"),
        ("/api/embeddings", OllamaEmbedding, text, prepare_older_embed, "A vector for one text"),
    ):
        spec = RouteSpec(
            "POST", path, answer, body=body, tag=_TAG, errors=OLLAMA_ERRORS, waits=True, takes_untyped=True
        )
        router.declare(spec, summary)(endpoint(state, prepare))


def _add_model_routes(router: Router, state: ServerState) -> None:
    @router.declare(RouteSpec(
        "GET", "/api/tags", OllamaModels, tag=_TAG, needs=Needs.NOTHING, errors=OLLAMA_ERRORS
    ))  # fmt: skip
    async def tags() -> Response:
        """Lists the served models and adapters."""
        return JSONResponse(model_tags([state]))

    @router.declare(RouteSpec(
        "GET", "/api/ps", OllamaRunningModels, tag=_TAG, needs=Needs.NOTHING, errors=OLLAMA_ERRORS
    ))  # fmt: skip
    async def ps() -> Response:
        """The models that are loaded."""
        return JSONResponse(running_models([state]))

    @router.declare(RouteSpec(
        "GET", "/api/version", OllamaVersion, tag=_TAG, needs=Needs.NOTHING, errors=OLLAMA_ERRORS
    ))  # fmt: skip
    async def version() -> Response:
        """The version of Ollama whose API this is."""
        return JSONResponse({"version": COMPATIBLE_VERSION})

    @router.declare(RouteSpec(
        "POST", "/api/show", OllamaShownModel, tag=_TAG, needs=Needs.NOTHING, errors=OLLAMA_ERRORS, takes_untyped=True,
        body=RequestBody(ShowRequest, one_of=({"model": ANY}, {"name": ANY}), has_ranges=False),
    ))  # fmt: skip
    async def show(request: Request) -> Response:
        """The facts of one model."""
        body = await read_object(state, request)
        return JSONResponse(await show_model(state, body))
