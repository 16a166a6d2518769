"""Routes of the OpenAI API, and vLLM's tokenizer routes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from llmstack_server.apis.openai.chat import prepare_chat
from llmstack_server.apis.openai.chat_batch import prepare_chat_batch
from llmstack_server.apis.openai.completions import prepare_completion
from llmstack_server.apis.openai.estimate import EstimateRequest, estimate
from llmstack_server.apis.openai.models import model_list, model_object
from llmstack_server.apis.openai.protocol import (
    BatchChatRequest,
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from llmstack_server.apis.openai.render import render_chat, render_completions
from llmstack_server.apis.openai.tokenization import detokenize, tokenize, tokenizer_info
from llmstack_server.state.server_state import ServerState
from llmstack_server.web.answers import GenerationResponse
from llmstack_server.web.body import BodyLimits, read_json_object
from llmstack_server.web.checks import check_model
from llmstack_server.web.openapi import GENERATION_RESPONSES, REQUEST_ERRORS, RequestBody, error_responses


def add_openai_routes(router: APIRouter, state: ServerState) -> None:
    """Adds completions, chat completions, the served models and the tokenizer."""
    _add_generation_routes(router, state)
    _add_render_routes(router, state)
    _add_estimate_route(router, state)
    _add_model_routes(router, state)
    _add_tokenizer_routes(router, state)


def _add_generation_routes(router: APIRouter, state: ServerState) -> None:
    @router.post("/v1/completions", responses=GENERATION_RESPONSES, openapi_extra=RequestBody(CompletionRequest))
    async def completions() -> Response:
        """Continues one or several prompts."""
        return GenerationResponse(state, prepare_completion)

    @router.post(
        "/v1/chat/completions", responses=GENERATION_RESPONSES, openapi_extra=RequestBody(ChatCompletionRequest)
    )
    async def chat_completions() -> Response:
        """Continues a conversation with the assistant's message."""
        return GenerationResponse(state, prepare_chat)

    @router.post(
        "/v1/chat/completions/batch", responses=GENERATION_RESPONSES, openapi_extra=RequestBody(BatchChatRequest)
    )
    async def chat_completions_batch() -> Response:
        """Continues several conversations, each with one choice of the answer."""
        return GenerationResponse(state, prepare_chat_batch)


def _add_render_routes(router: APIRouter, state: ServerState) -> None:
    @router.post("/v1/completions/render", responses=REQUEST_ERRORS, openapi_extra=RequestBody(CompletionRequest))
    async def completions_render(request: Request) -> Response:
        """Converts the prompts of a completion to token ids, and computes nothing."""
        return await _answer_json(state, request, render_completions)

    @router.post(
        "/v1/chat/completions/render", responses=REQUEST_ERRORS, openapi_extra=RequestBody(ChatCompletionRequest)
    )
    async def chat_completions_render(request: Request) -> Response:
        """Converts a conversation to token ids, and computes nothing."""
        return await _answer_json(state, request, render_chat)


def _add_estimate_route(router: APIRouter, state: ServerState) -> None:
    @router.post("/v1/estimate", responses=error_responses(400, 503), openapi_extra=RequestBody(EstimateRequest))
    async def estimate_route(request: Request) -> Response:
        """Predicts when the first token of a request would come, and computes nothing."""
        return await _answer_json(state, request, estimate)


def _add_model_routes(router: APIRouter, state: ServerState) -> None:
    @router.get("/v1/models/", include_in_schema=False)
    @router.head("/v1/models", include_in_schema=False)
    @router.get("/v1/models")
    async def models() -> Response:
        """Lists the served models."""
        return JSONResponse(model_list(state))

    @router.get("/v1/models/{model:path}", responses=error_responses(404))
    async def model(model: str) -> Response:
        """Returns one served model."""
        return JSONResponse(model_object(state, check_model(state, model)))


def _add_tokenizer_routes(router: APIRouter, state: ServerState) -> None:
    @router.post("/tokenize", responses=error_responses(400), openapi_extra=RequestBody(TokenizeRequest))
    async def tokenize_route(request: Request) -> Response:
        """Converts a prompt or a conversation to token ids."""
        return await _answer_json(state, request, tokenize)

    @router.post("/detokenize", responses=error_responses(400), openapi_extra=RequestBody(DetokenizeRequest))
    async def detokenize_route(request: Request) -> Response:
        """Converts token ids to text."""
        return await _answer_json(state, request, detokenize)

    if state.config.http.has_tokenizer_info:

        @router.get("/tokenizer_info")
        async def tokenizer_info_route() -> Response:
            """Returns the tokenizer's configuration."""
            return JSONResponse(await tokenizer_info(state))


async def _answer_json(
    state: ServerState, request: Request, answer: Callable[[ServerState, dict[str, Any]], Awaitable[Any]]
) -> Response:
    limits = BodyLimits(state.config.http.max_body_bytes, state.config.http.receive_timeout_s)
    body = await read_json_object(request.headers, request.receive, limits, state.decoding)
    return JSONResponse(await answer(state, body))
