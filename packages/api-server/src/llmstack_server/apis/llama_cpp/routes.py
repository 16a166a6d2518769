"""The route of llama.cpp's server that no other API has."""

from __future__ import annotations

from starlette.responses import Response

from llmstack_server.apis.llama_cpp.infill import prepare_infill
from llmstack_server.apis.llama_cpp.objects import Infill
from llmstack_server.apis.llama_cpp.protocol import InfillRequest
from llmstack_server.state.server_state import ServerState
from llmstack_server.web.answers import GenerationResponse
from llmstack_server.web.openapi_bodies import RequestBody
from llmstack_server.web.routes import Router, RouteSpec


def add_llama_cpp_routes(router: Router, state: ServerState) -> None:
    """Adds the route `/infill`."""
    text = {"type": "string"}

    @router.declare(RouteSpec(
        "POST", "/infill", Infill | list[Infill], tag="Completions", streams=True, waits=True,
        body=RequestBody(InfillRequest, required={"input_prefix": text, "input_suffix": text}),
    ))  # fmt: skip
    async def infill() -> Response:
        """Fills the gap between two texts, in llama.cpp's form."""
        return GenerationResponse(state, prepare_infill)
