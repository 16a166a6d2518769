"""Control routes that load and unload LoRA adapters, and those from the start."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from fastapi import Request
from pydantic import BaseModel, ConfigDict, StrictBool, StrictInt, StrictStr
from starlette.responses import PlainTextResponse, Response

from llmstack_server.options.adapter_options import start_modules
from llmstack_server.state.server_state import ServerState
from llmstack_server.web.body import read_object
from llmstack_server.web.errors import HTTPError, engine_unavailable, model_not_found
from llmstack_server.web.fields import parse
from llmstack_server.web.openapi_bodies import RequestBody
from llmstack_server.web.routes import Content, Router, RouteSpec
from llmstack_types import InvalidRequestError


class LoadLoRAAdapterRequest(BaseModel):
    """vLLM's fields of `/v1/load_lora_adapter`."""

    model_config = ConfigDict(extra="forbid")

    lora_name: StrictStr
    lora_path: StrictStr
    load_inplace: StrictBool = False


class UnloadLoRAAdapterRequest(BaseModel):
    """vLLM's fields of `/v1/unload_lora_adapter`."""

    model_config = ConfigDict(extra="forbid")

    lora_name: StrictStr
    lora_int_id: StrictInt | None = None


async def load_configured_adapters(state: ServerState) -> None:
    """Loads the adapters that the server is to have from the start.

    Raises:
        InvalidRequestError: One cannot be served; the text names it.
    """
    for flag, module in start_modules(state.config.adapters.modules, state.config.engine.default_mm_loras):
        _check_name(state, module.name)
        try:
            await state.engine.load_adapter(module.name, module.path, module.base_model_name)
        except InvalidRequestError as error:
            raise InvalidRequestError(f"{flag} {module.name}: {error.message}") from error


def add_adapter_routes(router: Router, state: ServerState, root: str) -> None:
    """Adds the routes; adapters are loaded from below the folder `root` only."""

    @router.declare(RouteSpec(
        "POST", "/v1/load_lora_adapter", Content.TEXT, body=RequestBody(LoadLoRAAdapterRequest), is_for_operators=True
    ))  # fmt: skip
    async def load(request: Request) -> Response:
        """Loads an adapter, which requests name as their model from then on."""
        fields = parse(LoadLoRAAdapterRequest, await read_object(state, request))
        name = fields.lora_name
        async with _changing(state, name):
            _check_name(state, name)  # no other model can load it now
            if state.engine.adapters.find(name) is not None and not fields.load_inplace:
                raise InvalidRequestError(
                    f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, "
                    "set 'load_inplace' to True.",
                    param="lora_name", code="invalid_value",
                )  # fmt: skip
            path = _path_below(root, fields.lora_path)
            await state.engine.load_adapter(name, path, on_change=state.adapters.publish)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    @router.declare(RouteSpec(
        "POST", "/v1/unload_lora_adapter", Content.TEXT, body=RequestBody(UnloadLoRAAdapterRequest),
        is_for_operators=True,
    ))  # fmt: skip
    async def unload(request: Request) -> Response:
        """Takes no further requests for an adapter; those that run go on to their ends."""
        name = parse(UnloadLoRAAdapterRequest, await read_object(state, request)).lora_name
        async with _changing(state, name):
            is_known = await state.engine.unload_adapter(name, state.adapters.publish)
        if not is_known:
            known = ", ".join(f"`{one.name}`" for one in state.engine.adapters.adapters[:8])
            raise model_not_found(name, known or "no adapters")
        return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")


@asynccontextmanager
async def _changing(state: ServerState, name: str) -> AsyncIterator[None]:
    """Keeps other changes of a name away.

    Raises:
        HTTPError: 503; an API process does not answer. It adopts the change with the next one.
    """
    try:
        async with state.adapters.changing(name):
            yield
    except TimeoutError:
        message = "An API process of the server does not answer, so the change is not known there yet."
        raise HTTPError(engine_unavailable(message)) from None


def _check_name(state: ServerState, name: str) -> None:
    if name in state.config.served_model_names or state.is_name_taken(name):
        owner = "the served model" if name in state.config.served_model_names else "another model, or of its adapter"
        raise InvalidRequestError(f"'{name[:64]}' is the name of {owner}.", param="lora_name", code="invalid_value")


def _path_below(root: str, path: str) -> str:
    """The real path of an adapter's folder; relative ones begin at the root.

    Raises:
        InvalidRequestError: It leads out of the root, by its text or by a link.
    """
    if "\0" not in path:
        folder = Path(os.path.realpath(root))
        real = Path(os.path.realpath(folder / path))
        if real != folder and real.is_relative_to(folder):
            return str(real)
    raise InvalidRequestError(
        "lora_path must lie below the folder of --lora-root.", param="lora_path", code="invalid_value"
    )
