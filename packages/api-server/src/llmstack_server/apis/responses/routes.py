"""Routes of the Responses API."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from llmstack_llm import request_errors
from llmstack_server.apis.responses.answers import ResponsesService
from llmstack_server.apis.responses.input_list import item_page, parse_count, parse_list_query
from llmstack_server.apis.responses.protocol import ResponseRequest
from llmstack_server.apis.responses.resuming import open_responses
from llmstack_server.apis.responses.shared import SharedResponses
from llmstack_server.apis.responses.store import ResponseStore
from llmstack_server.state.server_state import ServerState
from llmstack_server.web.answers import STREAM_HEADERS, GenerationResponse
from llmstack_server.web.keep_alive import with_comments
from llmstack_server.web.openapi import REQUEST_ERRORS, STREAM, RequestBody, error_responses


def add_responses_routes(router: APIRouter, state: ServerState) -> None:
    """Adds `/v1/responses` and the routes below it."""
    local = open_responses(state, _new_store(state))
    responses = SharedResponses(local, state.peers)
    service = ResponsesService(responses)
    errors = REQUEST_ERRORS

    @router.post("/v1/responses", responses=STREAM | errors, openapi_extra=RequestBody(ResponseRequest))
    async def create() -> Response:
        """Answers a conversation, and stores the answer."""
        return GenerationResponse(state, service.prepare)

    @router.post("/v1/responses/input_tokens", responses=errors, openapi_extra=RequestBody(ResponseRequest))
    async def input_tokens() -> Response:
        """Counts the input tokens of a request."""
        return GenerationResponse(state, service.prepare_count)

    @router.get("/v1/responses/{response_id}", responses=STREAM | error_responses(400, 401, 404))
    async def retrieve(response_id: str, request: Request) -> Response:
        """Returns a stored response, or its events again."""
        if not _boolean("stream", request.query_params.get("stream", "false")):
            return _json(await responses.fetch(response_id))
        after = request.query_params.get("starting_after")
        start = 0 if after is None else parse_count("starting_after", after) + 1
        events = with_comments(await responses.follow(response_id, start))
        return StreamingResponse(events, headers=STREAM_HEADERS)

    @router.post("/v1/responses/{response_id}/cancel", responses=error_responses(400, 401, 404))
    async def cancel(response_id: str) -> Response:
        """Cancels a response in the background."""
        return _json(await responses.cancel(response_id))

    @router.delete("/v1/responses/{response_id}", responses=error_responses(401, 404))
    async def delete(response_id: str) -> Response:
        """Deletes a stored response."""
        await responses.delete(response_id)
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})

    @router.get("/v1/responses/{response_id}/input_items", responses=error_responses(400, 401, 404))
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
