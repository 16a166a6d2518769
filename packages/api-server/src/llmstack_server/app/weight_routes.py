"""Control routes of trainers: other weights of the same model, in place."""

from __future__ import annotations

import asyncio
import logging
import os
from typing import Final, NotRequired, TypedDict

from fastapi import Request
from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictStr
from starlette.responses import JSONResponse, Response

from llmstack_llm import request_errors
from llmstack_llm.weight_updates import WeightUpdateError, update_engine_weights
from llmstack_server.app.pause_routes import wait_until_idle
from llmstack_server.options.reload_options import START_NAME
from llmstack_server.state.server_state import ServerState
from llmstack_server.web.body import read_object
from llmstack_server.web.errors import HTTPError, missing_parameter, reload_failed, server_shutting_down
from llmstack_server.web.fields import parse
from llmstack_server.web.openapi_bodies import RequestBody
from llmstack_server.web.routes import Needs, Router, RouteSpec
from llmstack_types.json_values import JSONObject

logger = logging.getLogger(__name__)

MAX_PATH_CHARS: Final = 4096
MAX_NAME_CHARS: Final = 64


class WeightsUpdated(TypedDict):
    """The weights that answer from now on, where they have changed."""

    message: str
    weights: NotRequired[dict[str, object]]


class UpdatedFromDisk(TypedDict):
    """The answer to an update of weights in SGLang's form."""

    success: bool
    message: str
    num_paused_requests: int


class InitRequest(BaseModel):
    """The fields of `/init_weight_transfer_engine`."""

    model_config = ConfigDict(extra="forbid")
    init_info: JSONObject = Field(description="empty: weights come in folders")


class StartRequest(BaseModel):
    """The fields of `/start_weight_update`."""

    model_config = ConfigDict(extra="forbid")
    is_checkpoint_format: StrictBool = Field(True, description="names and shapes are those of a checkpoint")


class FinishRequest(BaseModel):
    """The fields of `/finish_weight_update`: none."""

    model_config = ConfigDict(extra="forbid")


class UpdateInfo(BaseModel):
    """The place of the weights for `/update_weights`."""

    model_config = ConfigDict(extra="forbid")
    path: StrictStr = Field(
        max_length=MAX_PATH_CHARS, description="folder of safetensors files below --weight-update-dir"
    )


class UpdateRequest(BaseModel):
    """The fields of `/update_weights`."""

    model_config = ConfigDict(extra="forbid")
    update_info: UpdateInfo


class FromDiskRequest(BaseModel):
    """The fields of `/update_weights_from_disk`."""

    model_config = ConfigDict(extra="forbid")
    model_path: StrictStr = Field(
        max_length=MAX_PATH_CHARS, description="folder of safetensors files below --weight-update-dir"
    )
    abort_all_requests: StrictBool = Field(False, description="ends running requests; else they finish first")
    weight_version: StrictStr | None = Field(
        None, max_length=MAX_NAME_CHARS, description="the name of the weights in answers; that of the folder without it"
    )


def add_weight_routes(router: Router, state: ServerState) -> None:
    """Adds the routes of vLLM and of SGLang for weights in folders, where there is a folder for them."""
    root = state.config.reload.weight_update_dir
    if root is None:
        return
    updates = WeightUpdates(state, root)

    _add_vllm_routes(router, state, updates)

    @router.declare(RouteSpec(
        "POST", "/update_weights_from_disk", UpdatedFromDisk, body=RequestBody(FromDiskRequest), needs=Needs.AWAKE,
        statuses=(409,), is_for_operators=True,
    ))  # fmt: skip
    async def update_weights_from_disk(request: Request) -> Response:
        """Takes the weights of a folder at once, in SGLang's form."""
        fields = parse(FromDiskRequest, await read_object(state, request))
        path = updates.folder("model_path", fields.model_path)
        name = os.path.basename(path)
        if fields.weight_version is not None:
            name = checked_name("weight_version", fields.weight_version)
        await updates.run(path, name, aborts=fields.abort_all_requests)
        return JSONResponse({"success": True, "message": "Weights updated", "num_paused_requests": 0})


def _add_vllm_routes(router: Router, state: ServerState, updates: WeightUpdates) -> None:
    @router.declare(RouteSpec(
        "POST", "/init_weight_transfer_engine", WeightsUpdated, body=RequestBody(InitRequest), needs=Needs.AWAKE,
        is_for_operators=True,
    ))  # fmt: skip
    async def init_weight_transfer_engine(request: Request) -> Response:
        """Says that weights come in folders; there is no connection to be made."""
        fields = parse(InitRequest, await read_object(state, request))
        if fields.init_info:
            name = next(iter(fields.init_info))
            raise request_errors.unsupported_parameter(
                f"init_info.{name}", "weights come in folders, so 'init_info' must be empty"
            )
        return JSONResponse({"message": "Weight transfer initialized"})

    @router.declare(RouteSpec(
        "POST", "/start_weight_update", WeightsUpdated, body=RequestBody(StartRequest), needs=Needs.AWAKE,
        statuses=(409,), is_for_operators=True,
    ))  # fmt: skip
    async def start_weight_update(request: Request) -> Response:
        """Begins an update, whose weights are used from `/finish_weight_update` on."""
        fields = parse(StartRequest, await read_object(state, request))
        if not fields.is_checkpoint_format:
            raise request_errors.unsupported_value("is_checkpoint_format", "names and shapes are those of a checkpoint")
        updates.start()
        return JSONResponse({"message": "Weight update started"})

    @router.declare(RouteSpec(
        "POST", "/update_weights", WeightsUpdated, body=RequestBody(UpdateRequest), needs=Needs.AWAKE,
        statuses=(409,), is_for_operators=True,
    ))  # fmt: skip
    async def update_weights(request: Request) -> Response:
        """Takes the weights of a folder, at once or with `/finish_weight_update`; running requests finish first."""
        path = updates.folder(
            "update_info.path", parse(UpdateRequest, await read_object(state, request)).update_info.path
        )
        if updates.is_started:
            updates.take(path)
            return JSONResponse({"message": "Weights taken"})
        await updates.run(path, os.path.basename(path), aborts=False)
        return JSONResponse({"message": "Weights updated", "weights": state.weights_object()})

    @router.declare(RouteSpec(
        "POST", "/finish_weight_update", WeightsUpdated, body=RequestBody(FinishRequest), needs=Needs.AWAKE,
        statuses=(409,), is_for_operators=True,
    ))  # fmt: skip
    async def finish_weight_update(request: Request) -> Response:
        """Uses the weights of the update that was started; running requests finish first."""
        parse(FinishRequest, await read_object(state, request))
        path = updates.folder("update_info.path", updates.finish())  # again: it may have become another one, or in use
        await updates.run(path, os.path.basename(path), aborts=False)
        return JSONResponse({"message": "Weights updated", "weights": state.weights_object()})


def checked_name(param: str, name: str) -> str:
    """A name of weights, which logs and answers have.

    Raises:
        InvalidRequestError: It is empty, not printable, or that of the weights that the server begins with.
    """
    if not name or not name.isprintable() or name == START_NAME:
        reason = f"a name of weights is printable, and not {START_NAME!r}: that names those of the start"
        raise request_errors.invalid_value(param, reason)
    return name


class WeightUpdates:
    """One update at a time. No request is answered while the weights change: new ones are refused, and others end.

    Attributes:
        is_started: Whether an update is open, whose folder counts when it is finished.
    """

    def __init__(self, state: ServerState, root: str) -> None:
        """`root`: The folder below which weights lie."""
        self.is_started = False
        self._state, self._root = state, os.path.realpath(root)
        self._taken: str | None = None
        self._served = ""
        self._lock = asyncio.Lock()
        self._running: asyncio.Task[None] | None = None

    def folder(self, param: str, name: str) -> str:
        """The folder that a request names, by its absolute path or by that below the root.

        Raises:
            InvalidRequestError: It is no folder there, or the one whose weights are in use.
        """
        path = os.path.realpath(os.path.join(self._root, name)) if "\0" not in name else self._root
        if path == self._root or os.path.commonpath([path, self._root]) != self._root or not os.path.isdir(path):
            raise request_errors.invalid_value(param, "expected a folder below that of --weight-update-dir")
        if path == self._served:
            reason = "the weights of this folder are in use: files of weights in use must not change, so take another"
            raise request_errors.invalid_value(param, reason)
        checked_name(param, os.path.basename(path))
        return path

    def start(self) -> None:
        """Opens an update, in place of one that was not finished."""
        self.is_started, self._taken = True, None

    def take(self, path: str) -> None:
        """Notes the folder of the open update.

        Raises:
            HTTPError: 409, it has one.
        """
        if self._taken is not None:
            raise HTTPError(reload_failed("this update has its folder: one folder has all weights"))
        self._taken = path

    def finish(self) -> str:
        """Closes the open update; its folder.

        Raises:
            HTTPError: 409, there is none.
            InvalidRequestError: It has no weights.
        """
        if not self.is_started:
            raise HTTPError(reload_failed("no update was started"))
        path, self.is_started, self._taken = self._taken, False, None
        if path is None:
            raise missing_parameter(
                "update_info.path", "The update has no weights: /update_weights names their folder."
            )
        return path

    async def run(self, path: str, name: str, *, aborts: bool) -> None:
        """Returns when the weights of a folder answer; the end of the client's connection does not stop it.

        `aborts`: Running requests end at once.

        Raises:
            HTTPError: 409, nothing has changed; 503, requests run for too long.
        """
        if self._lock.locked():
            raise HTTPError(reload_failed("another update is running"))
        self._running = asyncio.create_task(self._run(path, name, aborts=aborts))
        await asyncio.shield(self._running)

    async def _run(self, path: str, name: str, *, aborts: bool) -> None:
        state = self._state
        async with self._lock:
            state.is_updating_weights = True
            try:
                await wait_until_idle(state, aborts=aborts, or_else="Nothing has changed")
                if state.lifecycle.is_stopping:
                    raise HTTPError(server_shutting_down())
                with state.in_flight.track():  # a drain waits for it
                    ready = await update_engine_weights(state.engine, path, name)
                state.follow_reload(name, ready)
                self._served = path
            except WeightUpdateError as error:
                logger.error("no update of the weights: %s", error)
                raise HTTPError(reload_failed(str(error))) from None
            finally:
                state.is_updating_weights = False
        logger.info("the weights of %s answer", name)
