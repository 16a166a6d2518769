"""Routes of the OpenAI API, and vLLM's tokenizer routes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import Request
from starlette.responses import JSONResponse, Response

from llmstack_server.apis.openai.chat import prepare_chat
from llmstack_server.apis.openai.chat_batch import MAX_NUM_CONVERSATIONS, prepare_chat_batch
from llmstack_server.apis.openai.completions import prepare_completion
from llmstack_server.apis.openai.estimate import EstimateRequest, estimate
from llmstack_server.apis.openai.models import MODEL, MODELS, MODELS_WITH_SLASH, model_list, model_object
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
from llmstack_server.web.answer_types import (
    ChatCompletion,
    Completion,
    Detokenized,
    Estimate,
    Rendered,
    Tokens,
)
from llmstack_server.web.answers import GenerationResponse
from llmstack_server.web.body import read_object
from llmstack_server.web.checks import check_model
from llmstack_server.web.openapi_bodies import ANY, CHAT_TOOLS, MESSAGES, PROMPTS, RequestBody, array
from llmstack_server.web.routes import Needs, Router, RouteSpec
from llmstack_types.json_values import JSONObject


def add_openai_routes(router: Router, state: ServerState) -> None:
    """Adds completions, chat completions, the served models and the tokenizer."""
    _add_generation_routes(router, state)
    _add_render_routes(router, state)
    _add_model_routes(router, state)
    _add_tokenizer_routes(router, state)


def _add_generation_routes(router: Router, state: ServerState) -> None:
    @router.declare(RouteSpec(
        "POST", "/v1/completions", Completion, tag="Completions",
        body=RequestBody(CompletionRequest, required={"prompt": PROMPTS}),
        streams=True, waits=True, is_resumable=True, is_in_batches=True,
    ))  # fmt: skip
    async def completions() -> Response:
        """Continues one or several prompts."""
        return GenerationResponse(state, prepare_completion)

    @router.declare(RouteSpec(
        "POST", "/v1/chat/completions", ChatCompletion, tag="Chat",
        body=RequestBody(ChatCompletionRequest, required={"messages": MESSAGES}, fields={"tools": CHAT_TOOLS}),
        streams=True, waits=True, is_resumable=True, is_in_batches=True,
    ))  # fmt: skip
    async def chat_completions() -> Response:
        """Continues a conversation with the assistant's message."""
        return GenerationResponse(state, prepare_chat)

    conversations = array(MESSAGES, minItems=1, maxItems=MAX_NUM_CONVERSATIONS)

    @router.declare(RouteSpec(
        "POST", "/v1/chat/completions/batch", ChatCompletion, tag="Chat",
        body=RequestBody(BatchChatRequest, required={"messages": conversations}, without=("tools", "tool_choice")),
        streams=True, waits=True,
    ))  # fmt: skip
    async def chat_completions_batch() -> Response:
        """Continues several conversations, each with one choice of the answer."""
        return GenerationResponse(state, prepare_chat_batch)


def _add_render_routes(router: Router, state: ServerState) -> None:
    @router.declare(RouteSpec(
        "POST", "/v1/completions/render", list[Rendered], tag="Completions",
        body=RequestBody(CompletionRequest, required={"prompt": PROMPTS}, has_ranges=False),
    ))  # fmt: skip
    async def completions_render(request: Request) -> Response:
        """Converts the prompts of a completion to token ids, and computes nothing."""
        return await _answer_json(state, request, render_completions)

    @router.declare(RouteSpec(
        "POST", "/v1/chat/completions/render", Rendered, tag="Chat",
        body=RequestBody(
            ChatCompletionRequest, required={"messages": MESSAGES}, fields={"tools": CHAT_TOOLS}, has_ranges=False
        ),
    ))  # fmt: skip
    async def chat_completions_render(request: Request) -> Response:
        """Converts a conversation to token ids, and computes nothing."""
        return await _answer_json(state, request, render_chat)

    ways = ({"prompt_tokens": ANY}, {"messages": MESSAGES}, {"prompt": ANY})

    @router.declare(RouteSpec(
        "POST", "/v1/estimate", Estimate, body=RequestBody(EstimateRequest, one_of=ways, has_ranges=False)
    ))  # fmt: skip
    async def estimate_route(request: Request) -> Response:
        """Predicts when the first token of a request would come, and computes nothing."""
        return await _answer_json(state, request, estimate)


def _add_model_routes(router: Router, state: ServerState) -> None:
    @router.declare(MODELS_WITH_SLASH)
    @router.declare(MODELS)
    async def models() -> Response:
        """Lists the served models."""
        return JSONResponse(model_list(state))

    @router.declare(MODEL)
    async def model(model: str) -> Response:
        """Returns one served model."""
        return JSONResponse(model_object(state, check_model(state, model)))


def _add_tokenizer_routes(router: Router, state: ServerState) -> None:
    @router.declare(RouteSpec(
        "POST", "/tokenize", Tokens, tag="Tokenizer", needs=Needs.ENGINE,
        body=RequestBody(
            TokenizeRequest, one_of=({"prompt": ANY}, {"messages": MESSAGES}), fields={"tools": CHAT_TOOLS}
        ),
    ))  # fmt: skip
    async def tokenize_route(request: Request) -> Response:
        """Converts a prompt or a conversation to token ids."""
        return await _answer_json(state, request, tokenize)

    @router.declare(RouteSpec(
        "POST", "/detokenize", Detokenized, tag="Tokenizer", needs=Needs.ENGINE,
        body=RequestBody(DetokenizeRequest, required={"tokens": array({"type": "integer"})}),
    ))  # fmt: skip
    async def detokenize_route(request: Request) -> Response:
        """Converts token ids to text."""
        return await _answer_json(state, request, detokenize)

    if state.config.http.has_tokenizer_info:

        @router.declare(RouteSpec("GET", "/tokenizer_info", JSONObject, tag="Tokenizer"))
        async def tokenizer_info_route() -> Response:
            """Returns the tokenizer's configuration."""
            return JSONResponse(await tokenizer_info(state))


async def _answer_json(
    state: ServerState, request: Request, answer: Callable[[ServerState, dict[str, object]], Awaitable[Any]]
) -> Response:
    body = await read_object(state, request)
    return JSONResponse(await answer(state, body))
