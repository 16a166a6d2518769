"""Resumable answers over a restart: what is kept of each, and how it goes on."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Hashable
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.types import Message, Receive, Scope

from llmstack_llm.admission.seeds import draw_seeds_from
from llmstack_server.state.answer_source import AnswerSource, OtherTextError, current_source
from llmstack_server.state.server_state import ServerState
from llmstack_server.state.stream_record import StreamRecord
from llmstack_server.web.clients import EVERYONE, Client, clients_of
from llmstack_server.web.errors import (
    ErrorAnswer,
    answer_to,
    engine_unavailable,
    invalid_api_key,
    request_quarantined,
)
from llmstack_server.web.recording import RECORDER, Recorder
from llmstack_server.web.routes import route_path
from llmstack_server.web.sse import Events
from llmstack_types import EngineDeadError, QuarantinedError

if TYPE_CHECKING:
    from llmstack_server.state.kept_rows import KeptRequest
    from llmstack_server.state.stream_rows import StreamRow
    from llmstack_server.state.stream_saver import StreamSaver

logger = logging.getLogger(__name__)

# A request that ends each server that it runs in must not do so for ever.
MAX_RESUMES = 5
RETRY_S = 0.5
RETRIED_STATUSES = frozenset({429, 503})
OTHER_MODEL = "The model, its computation or the form of its answers has changed since the answer began."
_KEPT_HEADERS = ("content-type", "anthropic-version", "anthropic-beta", "x-session-id")


class SavedStreams:
    """The answers that an earlier server has saved, until they are in the table, and those that go on."""

    def __init__(self, state: ServerState, saver: StreamSaver, rows: list[StreamRow]) -> None:
        self._state = state
        self._saver = saver
        self._rows = rows
        self._unfinished: list[tuple[StreamRecord, StreamRow]] = []
        self._restored: list[StreamRecord] = []
        self._tasks: set[asyncio.Task[None]] = set()

    def restore(self) -> None:
        """Puts the answers into the table, as far as its limits go; on the event loop. Idempotent."""
        rows, self._rows = self._rows, []
        table = self._state.streams.table
        for row in rows:
            answer, facts = row.answer, row.answer.facts
            record = table.restore(answer.id, answer.owner, facts["digest"], facts["keep_s"], facts["key"])
            if record is None:
                logger.error("a saved stream cannot go on: there are too many")
                self._saver.delete(answer.id)
                continue
            record.settled.set_result(table.index)
            if row.head is not None and (row.is_over or row.head.is_stream):
                record.restore(row.head, answer.parts, answer.num_parts)
            self._saver.restore(record, row)
            if row.is_over:
                record.is_over = True
                table.note_finished(record)
            else:
                self._unfinished.append((record, row))
            self._restored.append(record)

    def begin(self) -> None:
        """Begins to resume them; the engine is ready. Later calls do nothing."""
        self.restore()
        table = self._state.streams.table
        restored = [record for record in self._restored if table.get(record.id, record.owner) is record]
        self._restored.clear()
        for record in restored:
            table.note(record)
        self._start(self._state.streams.claim_restored([record.key for record in restored if record.key]))
        unfinished, self._unfinished = self._unfinished, []
        if unfinished:
            logger.info("%d streams go on", len(unfinished))
        for record, row in unfinished:
            self._start(self._resume(record, row))

    async def stop(self) -> None:
        """Leaves what has not ended for the next server."""
        await self._saver.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _start(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _resume(self, record: StreamRecord, row: StreamRow) -> None:
        async def count() -> None:
            self._saver.note_resume(record)
            await self._saver.saved()

        async def run(client: Client) -> bool:
            return record.abandoned.is_set() or not await self._is_refused(record, row, client)

        await resume(self._state, record.id, record.owner, row.request, count, run, partial(self._end, record, row))

    async def _is_refused(self, record: StreamRecord, row: StreamRow, client: Client) -> bool:
        """Runs the request to its end, unless the server is too busy for it now."""
        request = row.request
        application = self._state.application
        if application is None:
            return True
        recorder = _SecondRecorder(record, self._state, row)
        headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in request.headers]
        headers.append((b"content-length", str(len(request.body)).encode()))
        scope: Scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
            "path": request.path, "raw_path": request.path.encode(), "query_string": b"", "root_path": "",
            "client": ("restart", 0), "server": ("restart", 0), "headers": headers,
            "state": {"client": client, RECORDER: recorder},
        }  # fmt: skip
        draw_seeds_from(request.seed)
        row.source.begin_again()
        row.source.is_repeatable = holds_contract(self._state)
        current_source.set(row.source)
        await application(scope, Replay(request.body, lambda: abandonment(record)), recorder)
        if row.source.is_other:
            raise OtherTextError
        if recorder.status in RETRIED_STATUSES or await recorder.leave():
            return True
        if recorder.status >= 400 or record.num_parts < row.answer.num_parts:
            logger.error("the second run of a saved stream was answered with %d", recorder.status)
            raise OtherTextError
        recorder.finish()
        return False

    def _end(self, record: StreamRecord, row: StreamRow, answer: ErrorAnswer) -> None:
        """Ends an answer with an error, after what its readers may have seen; nothing else is remembered."""
        logger.error("a saved stream cannot go on: %s", answer.message)
        self._saver.on_removal(record)
        if not row.answer.num_parts:
            self._state.streams.table.remove(record)
        record.fail(dataclasses.asdict(answer))


class _SecondRecorder(Recorder):
    """Takes down the second run of a request, whose events are those of the first one and further ones.

    Attributes:
        status: Of the second run.
    """

    def __init__(self, record: StreamRecord, state: ServerState, row: StreamRow) -> None:
        super().__init__(record, state.streams.table, partial(is_ending, state))
        self.status = 0
        self._row = row

    async def __call__(self, message: Message) -> None:
        """Takes one message of ASGI; an error in place of the answer is not recorded."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
        if self.status < 400:
            await super().__call__(message)

    async def event(self, events: Events) -> None:
        """Adds events to those of the first run."""
        self.status = self.status or 200
        await super().event(events)

    async def fail(self, event: bytes) -> None:
        """Adds the event of an error, unless it comes in place of what readers may have."""
        if self._is_whole():
            await super().fail(event)

    def finish(self) -> None:
        """Marks the answer as complete, unless its text differs or ends too soon."""
        if self._is_whole():
            super().finish()

    def _is_whole(self) -> bool:
        return not self._row.source.is_other and self._record.num_parts >= self._row.answer.num_parts


def open_saved_streams(state: ServerState) -> None:
    """Opens the saved resumable streams, with `--state-dir`.

    Raises:
        ServeError: The database cannot be used; the text is one sentence.
    """
    folder = state.config.http.state_dir
    if folder is None:
        return
    # Late: most servers keep nothing, and do without SQLite.
    from llmstack_server.state.stream_rows import MAX_DOWNTIME_S, load_streams, open_rows
    from llmstack_server.state.stream_saver import StreamSaver

    table = state.streams.table
    rows = open_rows(Path(folder), state.config.deployment_secret, table.index, table.count)
    saver = StreamSaver(rows)
    streams, oldest = load_streams(rows, table.index, table.count), time.time() - MAX_DOWNTIME_S
    for row in streams:
        if row.answer.written_at <= oldest:
            saver.delete(row.answer.id)
    recent = [row for row in streams if row.answer.written_at > oldest]
    saved = SavedStreams(state, saver, recent)
    state.num_left_answers += sum(not row.is_over for row in recent)
    table.saver = saver
    state.streams.keep(saver, saved.restore)
    state.at_ready.append(saved.begin)
    state.at_end.append(saved.stop)


def keep_stream(state: ServerState, record: StreamRecord, scope: Scope, body: bytes) -> bool:
    """Begins to keep a new answer, and what this task draws for it; False where it is in memory alone."""
    saver = state.streams.saver
    if saver is None or state.ready is None:
        return False
    given = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
    headers = tuple((name, given[name]) for name in _KEPT_HEADERS if name in given)
    request, source = kept_request(state, route_path(scope), body, headers), AnswerSource()
    source.is_repeatable = holds_contract(state)
    is_kept = saver.keep(record, request, source)
    if is_kept:
        draw_seeds_from(request.seed)
        current_source.set(source)
    return is_kept


def kept_request(state: ServerState, path: str, body: bytes, headers: tuple[tuple[str, str], ...] = ()) -> KeptRequest:
    """A request whose answer is kept. Its task is to draw its seeds from that of the request."""
    # Late: most servers keep nothing, and do without SQLite.
    from llmstack_server.state.kept_rows import KeptRequest

    return KeptRequest(path, body, headers, secrets.randbits(62), identity_of(state))


def holds_contract(state: ServerState) -> bool:
    """Whether another run of a request has the same tokens."""
    return state.ready is not None and state.ready.backends.get("numeric_contract", "").startswith("holds")


def identity_of(state: ServerState) -> str:
    """An identity of all that tokens and events depend on besides the request; the engine must be ready."""
    contract = "" if state.ready is None else state.ready.numeric_contract_id
    form = _form_of(state.chat_parsers.facts, state.config.chat.response_role, state.config.http.answers)
    return f"{contract} {form}"


@lru_cache(maxsize=8)
def _form_of(*facts: Hashable) -> str:
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


async def resume(
    state: ServerState, answer_id: str, owner: str, request: KeptRequest, count: Callable[[], Awaitable[None]],
    run: Callable[[Client], Awaitable[bool]], end: Callable[[ErrorAnswer], None],
) -> None:  # fmt: skip
    """Goes on with an answer that an earlier server has begun: runs it with its client's rights, or ends it.

    `count`: Counts in the database that another server begins it again, before what may end this server.
    `run`: Generates it; False where the server is too busy for it now.
    `end`: Ends it with an error where it cannot go on.
    """
    client = next((one for one in clients_of(state.config) or [EVERYONE] if one.tenant == owner), None)
    if client is None:
        end(invalid_api_key())
    elif request.num_resumes >= MAX_RESUMES:
        end(request_quarantined(QuarantinedError.KILLS_ENGINES))
    elif state.ready is None or request.identity != identity_of(state):
        end(engine_unavailable(OTHER_MODEL))
    else:
        try:
            await count()
            while not await run(client):  # noqa: ASYNC110 (no event says that there is room)
                await asyncio.sleep(RETRY_S)
        except Exception as error:  # noqa: BLE001 (any error is the answer)
            end(answer_to(error, answer_id))


async def is_ending(state: ServerState) -> bool:
    """Whether this server ends, or cannot compute any more; one with other models goes on without an engine."""
    if state.is_one_of_several:
        return state.in_flight.is_ending
    if state.lifecycle.is_stopping:
        return True
    try:
        await state.engine.check_health()
    except EngineDeadError:
        return True
    return False


class Replay:
    """A `receive` of ASGI that gives a known body first, and then the messages of another `receive`."""

    def __init__(self, body: bytes, receive: Receive) -> None:
        self._body: bytes | None = body
        self._receive = receive

    async def __call__(self) -> Message:
        if self._body is None:
            return await self._receive()
        return {"type": "http.request", "body": self.take_body(), "more_body": False}

    def take_body(self) -> bytes:
        """The body, unless it was received before; nothing has to be awaited for it."""
        body, self._body = self._body, None
        return body or b""


async def abandonment(record: StreamRecord) -> Message:
    """The end of the client, once no reader has the answer or can come."""
    await record.abandoned.wait()
    return {"type": "http.disconnect"}
