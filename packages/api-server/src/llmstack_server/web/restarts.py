"""Resumable answers over a restart: what is kept of each, and how it goes on."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import logging
import secrets
import time
from functools import partial
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
from llmstack_server.web.recording import Recorder
from llmstack_server.web.routes import route_path
from llmstack_types import EngineDeadError, QuarantinedError

if TYPE_CHECKING:
    from llmstack_server.state.stream_rows import StreamRow
    from llmstack_server.state.stream_saver import StreamSaver

logger = logging.getLogger(__name__)

# A request that ends each server that it runs in must not do so for ever.
MAX_RESUMES = 5
RETRY_S = 0.5
RETRIED_STATUSES = frozenset({429, 503})
OTHER_MODEL = "The model, its computation or the form of its answers has changed since the answer began."
_KEPT_HEADERS = ("content-type", "anthropic-version", "anthropic-beta")


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
            record = table.restore(row.id, row.owner, row.digest, row.keep_s, row.key)
            if record is None:
                logger.error("a saved stream cannot go on: there are too many")
                continue
            record.settled.set_result(table.index)
            if row.head is not None and (row.is_over or row.head.is_stream):
                record.restore(row.head, row.parts)
            self._saver.restore(record, row)
            if row.is_over:
                record.is_over = True
                table.note_finished(record)
            else:
                self._unfinished.append((record, row))
            self._restored.append(record)

    def begin(self) -> None:
        """Begins to resume them; the engine is ready."""
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
        tenant_to_client = {client.tenant: client for client in clients_of(self._state.config)} or {"": EVERYONE}
        for record, row in unfinished:
            self._start(self._resume(record, row, tenant_to_client.get(row.owner)))

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

    async def _resume(self, record: StreamRecord, row: StreamRow, client: Client | None) -> None:
        refusal = refusal_of(self._state, client, row.request.identity, row.request.num_resumes)
        if refusal is not None or client is None:
            self._end(record, refusal or invalid_api_key())
        else:
            # Counts in the database before anything happens that may end this server.
            self._saver.note_resume(record)
            await self._saver.saved()
            try:
                await self._run_until_taken(record, row, client)
            except Exception as error:  # noqa: BLE001 (any error is the answer)
                self._end(record, answer_to(error, record.id))

    async def _run_until_taken(self, record: StreamRecord, row: StreamRow, client: Client) -> None:
        while await self._is_refused(record, row, client):
            if record.abandoned.is_set():
                return
            await asyncio.sleep(RETRY_S)

    async def _is_refused(self, record: StreamRecord, row: StreamRow, client: Client) -> bool:
        """Runs the request to its end, unless the server is too busy for it now."""
        request = row.request
        application = self._state.application
        if application is None or record.abandoned.is_set():
            return True
        recorder = _SecondRecorder(record, self._state, row.source)
        headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in request.headers]
        headers.append((b"content-length", str(len(request.body)).encode()))
        scope: Scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
            "path": request.path, "raw_path": request.path.encode(), "query_string": b"", "root_path": "",
            "client": ("restart", 0), "server": ("restart", 0), "headers": headers, "state": {"client": client},
        }  # fmt: skip
        draw_seeds_from(request.seed)
        row.source.begin_again()
        current_source.set(row.source)
        await application(scope, Replay(request.body, lambda: abandonment(record)), recorder.send)
        if row.source.is_other:
            raise OtherTextError
        if recorder.status in RETRIED_STATUSES or await recorder.leave():
            return True
        if recorder.status >= 400 or recorder.num_seen:
            logger.error("the second run of a saved stream was answered with %d", recorder.status)
            raise OtherTextError
        recorder.finish()
        return False

    def _end(self, record: StreamRecord, answer: ErrorAnswer) -> None:
        """Ends an answer with an error, after what its readers may have seen; nothing else is remembered."""
        logger.error("a saved stream cannot go on: %s", answer.message)
        self._saver.on_removal(record)
        if not record.num_parts:
            self._state.streams.table.remove(record)
        record.fail(dataclasses.asdict(answer))


class _SecondRecorder(Recorder):
    """Takes down the events of the second run of a request that follow those of the first one.

    Attributes:
        status: Of the second run.
        num_seen: Events of the first run that are still to come.
    """

    def __init__(self, record: StreamRecord, state: ServerState, source: AnswerSource) -> None:
        super().__init__(record, state.streams.table, partial(is_ending, state))
        self.status = 0
        self.num_seen = record.num_parts
        self._source = source

    async def send(self, message: Message) -> None:
        """Takes one message of ASGI; an error in place of the answer is not recorded."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
        if self.status < 400:
            await super().send(message)

    async def _append_event(self, event: bytes) -> None:
        if self.num_seen:
            self.num_seen -= 1
        elif not self._source.is_other:
            await super()._append_event(event)

    def finish(self) -> None:
        """The answer is complete, unless its text is another one."""
        if not self._source.is_other and not self.num_seen:
            super().finish()


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

    rows = open_rows(Path(folder), state.config.deployment_secret)
    saver = StreamSaver(rows)
    table = state.streams.table
    streams, oldest = load_streams(rows, table.index, table.count), time.time() - MAX_DOWNTIME_S
    for row in streams:
        if row.written_at <= oldest:
            saver.delete(row.id)
    saved = SavedStreams(state, saver, [row for row in streams if row.written_at > oldest])
    table.observer = saver
    state.streams.keep(saver, saved.restore)
    state.at_ready.append(saved.begin)
    state.at_end.append(saved.stop)


def keep_stream(state: ServerState, record: StreamRecord, scope: Scope, body: bytes) -> bool:
    """Begins to keep a new answer, and what this task draws for it; False where it is in memory alone."""
    saver = state.streams.saver
    if saver is None or state.ready is None:
        return False
    from llmstack_server.state.stream_rows import KeptRequest

    given = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
    headers = tuple((name, given[name]) for name in _KEPT_HEADERS if name in given)
    seed, source = secrets.randbits(62), AnswerSource()
    request = KeptRequest(route_path(scope), body, headers, seed, identity_of(state))
    is_kept = saver.keep(record, request, source)
    if is_kept:
        draw_seeds_from(seed)
        current_source.set(source)
    return is_kept


def identity_of(state: ServerState) -> str:
    """What tokens and events follow from besides the request; read it once the engine is ready."""
    contract = "" if state.ready is None else state.ready.numeric_contract_id
    form = repr((state.chat_parsers.facts, state.config.chat.response_role, state.config.http.answers))
    return f"{contract} {hashlib.sha256(form.encode()).hexdigest()[:16]}"


def refusal_of(state: ServerState, client: Client | None, identity: str, num_resumes: int) -> ErrorAnswer | None:
    """Why an answer that an earlier server has begun cannot go on; None where it can."""
    if client is None:
        return invalid_api_key()
    if num_resumes >= MAX_RESUMES:
        return request_quarantined(QuarantinedError.KILLS_ENGINES)
    return engine_unavailable(OTHER_MODEL) if state.ready is None or identity != identity_of(state) else None


async def is_ending(state: ServerState) -> bool:
    """Whether this server ends, or cannot compute any more."""
    if state.lifecycle.is_stopping:
        return True
    try:
        await state.engine.check_health()
    except EngineDeadError:
        return True
    return False


class Replay:
    """A `receive` that has a body again, and then what another `receive` has."""

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
