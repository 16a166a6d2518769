"""`/v1/streams/{id}`: reads on, or ends, an answer without its connection."""

from __future__ import annotations

from fastapi import Request
from starlette.responses import Response

from llmstack_server.app.steps import parse_number
from llmstack_server.state.server_state import ServerState
from llmstack_server.state.stream_record import StreamAwayError, UnknownStreamError
from llmstack_server.web.clients import current_client
from llmstack_server.web.errors import HTTPError, stream_not_found
from llmstack_server.web.openapi import NUMBER
from llmstack_server.web.restarts import open_saved_streams
from llmstack_server.web.resumable import LAST_EVENT_HEADER, read_event_id
from llmstack_server.web.routes import Content, Needs, Router, RouteSpec
from llmstack_server.web.stream_answer import StreamAnswer, raise_as_http


def add_stream_routes(router: Router, state: ServerState) -> None:
    """Adds the route, and shares the streams with the other API processes."""
    state.streams.share(state.peers, lambda: state.metrics.count_stream("abandoned"))
    open_saved_streams(state)

    @router.declare(RouteSpec(
        "GET", "/v1/streams/{stream_id}", dict[str, object], needs=Needs.NOTHING, streams=True,
        query={"after": (NUMBER, "the last event that is known")},
    ))  # fmt: skip
    async def stream(stream_id: str, request: Request) -> Response:
        """The rest of an answer after event `after`, or after the one in the header `Last-Event-ID`."""
        after = parse_number("after", request.query_params)
        if "after" not in request.query_params and LAST_EVENT_HEADER in request.headers:
            last_id, after = read_event_id(request.headers[LAST_EVENT_HEADER])
            if last_id != stream_id:
                raise HTTPError(stream_not_found())
        try:
            reader = await state.streams.open(stream_id, current_client.get().tenant, after)
        except (UnknownStreamError, StreamAwayError) as error:
            raise_as_http(error)
        state.metrics.count_stream("resumed")
        return StreamAnswer(state, reader)

    @router.declare(RouteSpec("DELETE", "/v1/streams/{stream_id}", Content.EMPTY, needs=Needs.NOTHING))
    async def forget(stream_id: str) -> Response:
        """Ends an answer: it is not kept, and not generated any further once its reader has left."""
        try:
            await state.streams.forget(stream_id, current_client.get().tenant)
        except (UnknownStreamError, StreamAwayError) as error:
            raise_as_http(error)
        return Response(status_code=200)
