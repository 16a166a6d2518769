"""Routes of the Responses API."""

from __future__ import annotations

from fastapi import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from llmstack_llm import request_errors
from llmstack_server.apis.responses.answers import ResponsesService
from llmstack_server.apis.responses.compaction import CompactedResponse
from llmstack_server.apis.responses.input_list import item_page, parse_count, parse_list_query
from llmstack_server.apis.responses.protocol import OF_COMPACTION, ResponseRequest
from llmstack_server.apis.responses.resuming import open_responses
from llmstack_server.apis.responses.shared import SharedResponses
from llmstack_server.apis.responses.store import ResponseStore
from llmstack_server.state.server_state import ServerState
from llmstack_server.web.answers import STREAM_HEADERS, GenerationResponse
from llmstack_server.web.api_types import Deleted, InputTokens, ItemPage, ResponseAnswer
from llmstack_server.web.error_forms import ErrorForm
from llmstack_server.web.errors import ErrorAnswer
from llmstack_server.web.keep_alive import with_comments
from llmstack_server.web.openapi import NUMBER, ORDER, TEXT, page_of
from llmstack_server.web.openapi_bodies import INPUT, RESPONSE_TOOLS, RequestBody
from llmstack_server.web.routes import Needs, Router, RouteSpec
from llmstack_server.web.sse import numbered_error_event


class ResponsesErrors(ErrorForm):
    """Errors in OpenAI's form, whose events are numbered."""

    def last_event(self, answer: ErrorAnswer, request_id: str, num_events: int) -> bytes:
        """The event `error`: it ends what a reader gets, and not the response."""
        return numbered_error_event(answer, num_events)


def add_responses_routes(router: Router, state: ServerState) -> None:
    """Adds `/v1/responses` and the routes below it."""
    local = open_responses(state, _new_store(state))
    responses = SharedResponses(local, state.peers)
    service = ResponsesService(responses)
    body = RequestBody(ResponseRequest, required={"input": INPUT}, fields={"tools": RESPONSE_TOOLS}, has_ranges=False)

    @router.declare(RouteSpec(
        "POST", "/v1/responses", ResponseAnswer, tag="Responses", errors=ResponsesErrors(), body=body,
        id_of_answer=("response_id", "$response.body#/id"),
        streams=True, waits=True, is_resumable=True, stores_answers=True, is_in_batches=True,
    ))  # fmt: skip
    async def create() -> Response:
        """Answers a conversation, and stores the answer."""
        return GenerationResponse(state, service.prepare)

    @router.declare(RouteSpec(
        "POST", "/v1/responses/input_tokens", InputTokens, tag="Responses", needs=Needs.ENGINE, body=body
    ))  # fmt: skip
    async def input_tokens() -> Response:
        """Counts the input tokens of a request."""
        return GenerationResponse(state, service.prepare_count)

    _add_compaction(router, state, service)
    _add_stored_routes(router, responses)


def _add_compaction(router: Router, state: ServerState, service: ResponsesService) -> None:
    without = sorted(ResponseRequest.model_fields.keys() - OF_COMPACTION)
    body = RequestBody(ResponseRequest, fields={"input": INPUT}, without=without, has_ranges=False)

    @router.declare(RouteSpec(
        "POST", "/v1/responses/compact", CompactedResponse, tag="Responses", errors=ResponsesErrors(), body=body,
        waits=True,
    ))  # fmt: skip
    async def compact() -> Response:
        """Replaces a conversation by its user's messages and a summary."""
        return GenerationResponse(state, service.prepare_compaction)


def _add_stored_routes(router: Router, responses: SharedResponses) -> None:
    @router.declare(RouteSpec(
        "GET", "/v1/responses/{response_id}", ResponseAnswer, tag="Responses", needs=Needs.NOTHING, streams=True,
        query={
            "stream": ({"type": "boolean", "default": False}, "whether the events are sent again"),
            "starting_after": (NUMBER, "the last event that is known"),
        },
    ))  # fmt: skip
    async def retrieve(response_id: str, request: Request) -> Response:
        """Returns a stored response, or its events again."""
        after = request.query_params.get("starting_after")
        start = 0 if after is None else parse_count("starting_after", after) + 1
        if not _boolean("stream", request.query_params.get("stream", "false")):
            return _json(await responses.fetch(response_id))
        events = with_comments(await responses.follow(response_id, start))
        return StreamingResponse(events, headers=STREAM_HEADERS)

    @router.declare(RouteSpec(
        "POST", "/v1/responses/{response_id}/cancel", ResponseAnswer, tag="Responses", needs=Needs.NOTHING,
        statuses=(400,),
    ))  # fmt: skip
    async def cancel(response_id: str) -> Response:
        """Cancels a response in the background."""
        return _json(await responses.cancel(response_id))

    @router.declare(RouteSpec(
        "DELETE", "/v1/responses/{response_id}", Deleted, tag="Responses", needs=Needs.NOTHING
    ))  # fmt: skip
    async def delete(response_id: str) -> Response:
        """Deletes a stored response."""
        await responses.delete(response_id)
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})

    @router.declare(RouteSpec(
        "GET", "/v1/responses/{response_id}/input_items", ItemPage, tag="Responses", needs=Needs.NOTHING,
        query={
            "limit": page_of(20, 100, "items"), "order": ORDER,
            "after": (TEXT, "the last item of the page before"),
        },
    ))  # fmt: skip
    async def input_items(response_id: str, request: Request) -> Response:
        """Returns a page of the input items of a response."""
        query = parse_list_query(request.query_params)
        return JSONResponse(item_page(await responses.input_items(response_id), query))


def _new_store(state: ServerState) -> ResponseStore:
    http = state.config.http
    limits = http.response_store
    store = ResponseStore(
        limits.max_responses,
        limits.max_bytes,
        max_age_s=limits.max_age_s,
        has_several_owners=len(http.api_keys) > 1,
    )
    state.ticks.append(store.expire)
    return store


def _json(data: bytes) -> Response:
    return Response(data, media_type="application/json")


def _boolean(param: str, text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise request_errors.invalid_value(param, "expected 'true' or 'false'")
    return text.lower() == "true"
