"""Names of models with the tags that Ollama gives them."""

from __future__ import annotations

from typing import Final

from llmstack_server.state.server_state import ServerState
from llmstack_types.json_values import JSONObject

LATEST: Final = ":latest"
Fields = JSONObject
"""An object of a request or an answer."""


def without_tag(state: ServerState, body: Fields) -> Fields:
    """The body with the served name that `model` means: clients add the tag `:latest` to a name without one."""
    model = body.get("model")
    if not isinstance(model, str) or model in state.config.served_model_names or not model.endswith(LATEST):
        return body
    return {**body, "model": model.removesuffix(LATEST)}


def plain_name(state: ServerState, model: str | None) -> str:
    """The name in an answer: that of the request, or the first served one."""
    return model or state.served_model_name
