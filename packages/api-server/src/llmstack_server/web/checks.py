"""Checks of a request's fields that need no engine."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from pydantic import BaseModel

from llmstack_llm.requests import Adapter
from llmstack_server.state.server_state import ServerState
from llmstack_server.web.deadlines import limit_deadline
from llmstack_server.web.errors import model_not_found, unknown_parameter
from llmstack_server.web.fields import GenerationFields, PoolingFields, unknown_fields
from llmstack_server.web.sampling import CONTROL_FIELDS, STREAM_FIELDS, check_control_fields, check_stream_options
from llmstack_server.web.sessions import SESSION_FIELDS, set_session
from llmstack_server.web.unsupported import IGNORED, Predicate, check_unsupported

logger = logging.getLogger(__name__)


def check_fields(
    state: ServerState, body: dict[str, object], fields: BaseModel, unsupported: Mapping[str, Predicate]
) -> None:
    """Checks the fields after their types; a deadline among them is that of the current request from now on.

    Raises:
        InvalidRequestError: In this order: model, fields that are not available, combinations.
    """
    if "model" in type(fields).model_fields:  # where it is another field that is not known, it has any type
        adapter_of(state, fields.model)  # type: ignore[attr-defined]  # not every model of a body has it
    check_unsupported(body, unsupported)
    if fields.model_extra:
        _count_unknown(state, fields, unsupported)
    if isinstance(fields, GenerationFields) and not STREAM_FIELDS.isdisjoint(fields.model_fields_set):
        check_stream_options(fields)
    if isinstance(fields, GenerationFields | PoolingFields) and not CONTROL_FIELDS.isdisjoint(fields.model_fields_set):
        check_control_fields(fields)
        if isinstance(fields, GenerationFields) and fields.deadline_ms is not None:
            limit_deadline(fields.deadline_ms / 1000)
    if isinstance(fields, GenerationFields) and not SESSION_FIELDS.isdisjoint(fields.model_fields_set):
        set_session(fields.session_id, fields.session_final, fields.prompt_cache_key)


def _count_unknown(state: ServerState, fields: BaseModel, known: Mapping[str, Predicate]) -> None:
    unknown = [name for name in unknown_fields(fields) if name not in known and name not in IGNORED]
    if not unknown:
        return
    if state.config.http.is_strict_params:
        raise unknown_parameter(unknown[0])
    state.metrics.unknown_parameters.inc(len(unknown))
    logger.debug("ignored %d unknown request fields", len(unknown))


def check_model(state: ServerState, model: str | None) -> str:
    """The model name of the answer; without a model it is the first served name.

    Raises:
        InvalidRequestError: Code `model_not_found`.
    """
    adapter_of(state, model)
    return model or state.served_model_name


def adapter_of(state: ServerState, model: str | None) -> Adapter | None:
    """The adapter that a model name stands for now; None for the served model alone.

    What a request runs with is asked for after its last wait: its adapter may have been unloaded since its checks.

    Raises:
        InvalidRequestError: Code `model_not_found`.
    """
    if model is None or model in state.config.served_model_names:
        return None
    registry = None if state.opened_engine is None else state.opened_engine.adapters
    adapter = None if registry is None else registry.find(model)
    if adapter is None:
        adapters = [] if registry is None else [one.name for one in registry.adapters]
        names = [*state.config.served_model_names, *adapters][:8]
        raise model_not_found(model, ", ".join(f"`{one}`" for one in names))
    return adapter
