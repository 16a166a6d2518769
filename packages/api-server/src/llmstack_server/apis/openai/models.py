"""The served models, as the API lists them."""

from __future__ import annotations

import hashlib
from typing import Protocol

from llmstack_server.state.server_state import ServerState
from llmstack_server.web.answer_types import Model, ModelList, Permission
from llmstack_server.web.checks import adapter_of
from llmstack_server.web.routes import Needs, RouteSpec
from llmstack_server.web.websocket import can_open_websockets


class ListedAdapter(Protocol):
    """An adapter that may be loaded, or not."""

    @property
    def path(self) -> str: ...

    @property
    def base_model_name(self) -> str | None: ...


MODELS = RouteSpec(
    "GET HEAD", "/v1/models", ModelList, tag="Models", needs=Needs.NOTHING,
    id_of_answer=("model", "$response.body#/data/0/id"),
)  # fmt: skip
"""The route of all models, of a server with one and of one with several."""
MODELS_WITH_SLASH = RouteSpec("GET", "/v1/models/", ModelList, is_documented=False, needs=Needs.NOTHING)
MODEL = RouteSpec("GET", "/v1/models/{model:path}", Model, tag="Models", needs=Needs.NOTHING)


def model_object(state: ServerState, name: str, adapter: ListedAdapter | None = None) -> dict[str, object]:
    """The `model` object of one served name. `adapter` is what it stands for; without one it is looked for."""
    adapter = adapter or adapter_of(state, name)
    return {
        "id": name,
        "object": "model",
        "created": state.created,
        "owned_by": "llmstack",
        "root": state.config.model or state.served_model_name if adapter is None else adapter.path,
        "parent": None if adapter is None else adapter.base_model_name or state.served_model_name,
        "max_model_len": None if state.ready is None else state.ready.max_model_len,
        "chat": _chat_facts(state),
        "speech": _speech_facts(state),
        "permission": [_permission(state, name)],
        **_weight_fields(state),
    }


def _chat_facts(state: ServerState) -> dict[str, object] | None:
    """Facts for a page with chats; None before the engine is ready, and for a model that does not chat."""
    facts = state.engine.chat_facts if state.ready is not None and state.opened_engine is not None else None
    if facts is None:
        return None
    limits = {"pictures": facts.pictures, "sounds": facts.sounds}
    return {**facts._asdict(), **{name: None if one is None else one._asdict() for name, one in limits.items()}}


def _speech_facts(state: ServerState) -> dict[str, object] | None:
    """The ways to send sound; None before the engine is ready, and for a model that does not transcribe."""
    engine = state.opened_engine
    if state.ready is None or engine is None or engine.speech is None:
        return None
    return {"realtime": can_open_websockets()}


def _weight_fields(state: ServerState) -> dict[str, object]:
    """Which weights answer, and which have answered before, where a reload may exchange them."""
    if not state.config.reload.changes_weights:
        return {}
    return {"weights": state.weights_object(), "previous_weights": list(state.previous_weights)}


def _permission(state: ServerState, name: str) -> Permission:
    """The permissions that older clients look for: everything that the server offers."""
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


def model_list(state: ServerState) -> dict[str, object]:
    """The list of all served models, and then of all adapters."""
    adapters = [] if state.opened_engine is None else [one.name for one in state.opened_engine.adapters.adapters]
    names = [*state.config.served_model_names, *adapters]
    return {"object": "list", "data": [model_object(state, name) for name in names]}
