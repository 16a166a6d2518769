"""The models that are served, as the API lists them."""

from __future__ import annotations

import hashlib
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
        "permission": [_permission(state, name)],
    }


def _permission(state: ServerState, name: str) -> dict[str, Any]:
    """Everybody who gets here may do everything but what is not offered; clients of older days look for it."""
    return {
        "id": "modelperm-" + hashlib.sha256(name.encode()).hexdigest()[:24],
        "object": "model_permission",
        "created": state.created,
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }


def model_list(state: ServerState) -> dict[str, Any]:
    """All served names."""
    return {"object": "list", "data": [model_object(state, name) for name in state.config.served_model_names]}
