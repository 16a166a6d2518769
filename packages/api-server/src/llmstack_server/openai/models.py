"""The models that are served, as the API lists them."""

from __future__ import annotations

from typing import Any

from llmstack_server.http.errors import model_not_found
from llmstack_server.state import ServerState


def check_model(state: ServerState, model: str | None) -> str:
    """The name an answer carries; a missing model means the one that is served.

    Raises:
        InvalidRequestError: Code `model_not_found`.
    """
    names = state.config.served_model_names
    if model is None or model in names:
        return model or state.served_model_name
    raise model_not_found(model, ", ".join(f"`{name}`" for name in names[:8]))


def model_object(state: ServerState, name: str) -> dict[str, Any]:
    """One entry of the list."""
    return {
        "id": name,
        "object": "model",
        "created": state.created,
        "owned_by": "llmstack",
        "root": state.config.model or state.served_model_name,
        "parent": None,
        "max_model_len": None if state.ready is None else state.ready.max_model_len,
        "permission": [],
    }


def model_list(state: ServerState) -> dict[str, Any]:
    """All served names."""
    return {"object": "list", "data": [model_object(state, name) for name in state.config.served_model_names]}
