"""Responses of earlier servers: those that are stored, and those that go on."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

from llmstack_server.apis.responses.local import LocalResponses
from llmstack_server.apis.responses.prepare import prepare_again
from llmstack_server.apis.responses.store import ResponseStore, StoredResponse
from llmstack_server.state.server_state import ServerState
from llmstack_server.web.clients import Client, current_client
from llmstack_server.web.errors import ErrorAnswer
from llmstack_server.web.restarts import resume
from llmstack_types import ServerOverloadedError

if TYPE_CHECKING:
    from llmstack_server.apis.responses.saver import ResponseSaver
    from llmstack_server.state.kept_rows import KeptRequest

logger = logging.getLogger(__name__)

_NAME = re.compile(r"responses-([0-9]{1,4})\.sqlite3")


class Unfinished:
    """Responses in the background that an earlier server has begun; they go on one after the other."""

    def __init__(self, state: ServerState, local: LocalResponses, responses: list[StoredResponse]) -> None:
        self._state = state
        self._local = local
        self._responses = responses
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Begins to resume them; the engine is ready. Later calls do nothing."""
        responses, self._responses = self._responses, []
        if responses:
            logger.info("%d responses in the background go on", len(responses))
            self._task = asyncio.get_running_loop().create_task(self._resume_all(responses))

    async def stop(self) -> None:
        """Leaves those that have not begun for the next server."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _resume_all(self, responses: list[StoredResponse]) -> None:
        for stored in responses:
            if stored.request is not None:
                await self._resume(stored, stored.request)

    async def _resume(self, stored: StoredResponse, request: KeptRequest) -> None:
        async def count() -> None:
            stored.request = request.begun_again()
            if self._local.saver is not None:
                self._local.saver.on_change(stored)
                await self._local.saver.saved()

        async def run(client: Client) -> bool:
            if not self._is_wanted(stored):
                return True
            current_client.set(client)
            try:
                response_run = await prepare_again(self._state, stored, request)
            except ServerOverloadedError:
                return False
            if self._is_wanted(stored):  # it was not cancelled meanwhile
                self._local.resume(response_run, stored)
            else:
                await response_run.outputs.aclose()
            return True

        def end(error: ErrorAnswer) -> None:
            if stored.is_running:
                self._local.end_unstarted(stored, "failed", error)

        await resume(self._state, stored.id, stored.owner, request, count, run, end)

    def _is_wanted(self, stored: StoredResponse) -> bool:
        return stored.is_running and self._local.store.get(stored.id, stored.owner) is stored


def open_responses(state: ServerState, store: ResponseStore) -> LocalResponses:
    """The responses of this process; with `--state-dir`, those of earlier servers are among them.

    Raises:
        ServeError: The database cannot be used; the text is one sentence.
    """
    folder = state.config.http.state_dir
    if folder is None or not store.is_enabled:
        return LocalResponses(state, store)
    # Late: most servers keep nothing, and do without SQLite.
    from llmstack_server.apis.responses.response_table import database_path, response_decoder
    from llmstack_server.apis.responses.saver import ResponseSaver
    from llmstack_server.state.kept_rows import KeptRows

    index, count = (0, 1) if state.peers is None else (state.peers.index, state.peers.count)
    rows = KeptRows(database_path(folder, index), state.config.deployment_secret)
    for number in _left_over(Path(folder), index, count):
        rows.adopt(database_path(folder, number))
    saver = ResponseSaver(rows)
    unfinished = _fill(store, saver, rows.load(response_decoder(time.time(), time.monotonic())))
    local = LocalResponses(state, store, saver)
    going_on = Unfinished(state, local, unfinished)
    state.num_left_answers += len(unfinished)
    state.at_ready.append(going_on.begin)
    state.at_end += [going_on.stop, saver.close]
    return local


def _fill(store: ResponseStore, saver: ResponseSaver, loaded: list[StoredResponse]) -> list[StoredResponse]:
    """Puts the responses of the database into the store, as far as its limits go; returns those that are running."""
    for stored in loaded:
        saver.note_loaded(stored)
    store.saver = saver
    unfinished = []
    for stored in loaded:
        try:
            store.put(stored)
        except ServerOverloadedError:
            logger.error("response %s cannot go on: the store is full of running ones", stored.id)
            continue
        if stored.is_running:
            unfinished.append(stored)
    saver.forget_loaded()
    return unfinished


def _left_over(folder: Path, index: int, count: int) -> list[int]:
    """The numbers of processes that an earlier server had more of, as far as this one adopts their databases."""
    numbers = [int(match.group(1)) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
    return [number for number in sorted(numbers) if number >= count and number % count == index]
