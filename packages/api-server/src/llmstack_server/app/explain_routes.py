"""`GET /v1/requests/{id}/explanation`: where the time of a request went."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from fastapi import APIRouter
from starlette.responses import JSONResponse, Response

from llmstack_server.state.server_state import ServerState
from llmstack_server.web.clients import current_client
from llmstack_server.web.errors import HTTPError, request_not_found
from llmstack_server.web.openapi import error_responses
from llmstack_types import StepRecording

if TYPE_CHECKING:
    from llmstack_engine_core.explain import Explanation


def add_explanation_route(router: APIRouter, state: ServerState) -> None:
    """Adds the route, which needs the API key. Operators may ask for every request, others for their own."""

    @router.get("/v1/requests/{request_id}/explanation", responses=error_responses(404))
    async def explanation(request_id: str) -> Response:
        """Where the time of a request went, as sentences and as figures, while the server keeps its steps."""
        client = current_client.get()
        tenant = None if client.is_operator else client.tenant
        for engine_index in range(len(state.engine.engines)):
            log = await state.engine.recent_steps(0, engine_index)
            found = await asyncio.to_thread(_explain, log, request_id, tenant, state)
            if found is not None:
                return JSONResponse({"id": found.request_id, "sentences": found.sentences, "facts": found.facts})
        raise HTTPError(request_not_found())


def _explain(log: StepRecording, request_id: str, tenant: str | None, state: ServerState) -> Explanation | None:
    """The explanation; None where the request is unknown, or of another tenant."""
    from llmstack_engine_core.explain import Limits, UnknownRequestError, explain  # late: few requests need it

    def is_shown(other: str) -> bool:
        return log.tenants.get(other) == tenant

    # The answers of one request have ids of their own where there are several.
    names = {row.request_id for record in log.steps for row in record.rows} | {event.request_id for event in log.events}
    name = request_id if request_id in names else f"{request_id}-0"
    if tenant is not None and not is_shown(name):
        return None
    engine = state.config.engine
    limits = Limits(engine.max_num_seqs, engine.max_num_batched_tokens)
    try:
        return explain(log, name, limits, None if tenant is None else is_shown)
    except UnknownRequestError:
        return None
