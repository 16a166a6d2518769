"""Responses that are generated in the background."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import asdict

from llmstack_server.apis.responses.run import NumberedEvent, ResponseRun
from llmstack_server.apis.responses.store import ResponseStore, StoredResponse, encode
from llmstack_server.state.server_state import ServerState
from llmstack_server.web.errors import (
    ErrorAnswer,
    HTTPError,
    answer_to,
    server_shutting_down,
)
from llmstack_server.web.sse import encode_json, frame_named
from llmstack_types import EngineDeadError


class BackgroundResponse:
    """One response with its own task, which counts as a request in flight: a drain waits for it.

    Attributes:
        stored: Its entry in the store, from its start on.
    """

    def __init__(self, state: ServerState, store: ResponseStore, run: ResponseRun, stored: StoredResponse) -> None:
        self.run = run
        self.stored = stored
        self._state = state
        self._store = store
        self._num_cut_bytes = 0 if stored.source is None else stored.source.num_bytes
        self._task: asyncio.Task[None] | None = None

    def start(self, on_end: Callable[[], object]) -> None:
        """Starts the task of the response, which is in the store; `on_end` is called at its end."""
        self._task = asyncio.create_task(self._drive())
        self._task.add_done_callback(lambda _task: on_end())

    async def cancel(self) -> None:
        """Cancels the response, which keeps its output so far; returns after its end."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))

    async def _drive(self) -> None:
        with self._state.in_flight.track() as cut:
            try:
                await self._generate_until(cut)
            except asyncio.CancelledError:
                self.run.cancel()
            except Exception as error:  # noqa: BLE001 (any error becomes that of the response)
                answer = answer_to(error, self.stored.id)
                if self.stored.request is not None and _ends_the_server(self._state, error):
                    self._leave(answer)
                    return
                self._fail(answer)
            self._end()

    async def _generate_until(self, cut: asyncio.Future[None]) -> None:
        generating = asyncio.create_task(self._generate())
        try:
            await asyncio.wait((generating, cut), return_when=asyncio.FIRST_COMPLETED)
            if not generating.done():
                raise HTTPError(server_shutting_down())
            generating.result()
        finally:
            generating.cancel()
            await asyncio.gather(generating, return_exceptions=True)

    async def _generate(self) -> None:
        async with aclosing(self.run.events()) as events:
            async for event in events:
                self._log(event)

    def _log(self, event: NumberedEvent) -> None:
        log, source = self.stored.events, self.stored.source
        if log is None or event["sequence_number"] < log.num_parts:  # an earlier run has had it
            return
        framed, num_before = frame_named(event), self._num_cut_bytes
        log.put(framed)
        self._num_cut_bytes = 0 if source is None else source.num_bytes
        self._store.grow(self.stored, len(framed) + self._num_cut_bytes - num_before)

    def _fail(self, error: ErrorAnswer) -> None:
        event = self.run.fail(error)
        log = self.stored.events
        if log is not None:
            log.put(frame_named(event | {"sequence_number": log.num_parts}))

    def _end(self) -> None:
        items = tuple(encode(item) for item in self.run.output_items())
        data = encode_json(self.run.as_object()).encode("utf-8", "replace")
        if self.stored.events is not None:
            self.stored.events.finish()
        self._store.complete(self.stored, data, items)

    def _leave(self, error: ErrorAnswer) -> None:
        """Ends its readers alone: the next server finishes the response, and they can read on there."""
        if self.stored.events is not None:
            self.stored.events.fail(asdict(error))


def _ends_the_server(state: ServerState, error: Exception) -> bool:
    """Whether the response is only cut because this server ends."""
    if isinstance(error, HTTPError):
        return error.answer.code == "server_shutting_down"
    return isinstance(error, EngineDeadError) and not state.is_one_of_several
