"""Middleware for requests whose answers outlive their connections."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import re
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from functools import partial

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llmstack_llm import request_errors
from llmstack_server.state.remote_streams import Reader
from llmstack_server.state.server_state import ServerState
from llmstack_server.state.stream_record import StreamRecord
from llmstack_server.web.body import BodyLimits, ClientDisconnected, read_body
from llmstack_server.web.clients import current_client
from llmstack_server.web.errors import HTTPError, answer_to, server_shutting_down, stream_not_found
from llmstack_server.web.recording import RECORDER, Recorder
from llmstack_server.web.restarts import Replay, abandonment, is_ending, keep_stream
from llmstack_server.web.routes import route_path
from llmstack_server.web.stream_answer import RESUMABLE_HEADER, StreamConnection, raise_as_http

KEY_HEADER = "Idempotency-Key"
RESUME_HEADER = "x-llmstack-resume"
LAST_EVENT_HEADER = "last-event-id"
MAX_KEY_CHARS = 255
MAX_KEEP_S = 60

RESUMING_HEADERS = frozenset({KEY_HEADER.lower().encode(), RESUME_HEADER.encode(), LAST_EVENT_HEADER.encode()})
_EVENT_ID = re.compile(r"([0-9a-f]{32})\.([0-9]{1,9})")


@dataclass(frozen=True, slots=True)
class Asked:
    """The headers of a request that ask for resumption or idempotency.

    Attributes:
        key: The value of `Idempotency-Key`.
        keep_s: Seconds that the answer is kept without a reader.
        last_event: The id of a stream, and the number of the last event that came.
    """

    key: str | None
    keep_s: int
    last_event: tuple[str, int] | None


class ResumableMiddleware:
    """Generates the answers of requests with one of `RESUMING_HEADERS` in tasks, around what may refuse new work."""

    def __init__(self, app: ASGIApp, state: ServerState, *, stores_answers: bool) -> None:
        """`stores_answers`: Whether the route has a store of its own, which outlives the server."""
        self._app = app
        self._stores_answers = stores_answers
        self._state = state
        self._tasks: set[asyncio.Task[None]] = set()
        state.at_end.append(self._end)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers, http, path = _texts(scope), self._state.config.http, route_path(scope)
        asked = read_headers(headers)
        body = bytes(await read_body(headers, receive, BodyLimits(http.max_body_bytes, http.receive_timeout_s)))
        owner = current_client.get().tenant
        digest = hashlib.sha256(b"%b %b " % (path.encode(), owner.encode()) + body).hexdigest()
        found = await self._find(asked, digest, owner)
        metrics = self._state.metrics
        if found is None:
            metrics.count_stream("refused")
            await self._app(scope, Replay(body, receive), _marked(send))
        elif isinstance(found, StreamRecord):
            metrics.count_stream("started")
            reader = found.open(0)
            is_kept = not self._stores_answers and keep_stream(self._state, found, scope, body)
            self._start(scope, body, found, is_kept)
            await StreamConnection(self._state, reader, is_first=True).answer(scope, receive, send)
        else:
            metrics.count_stream("joined" if asked.last_event is None else "resumed")
            await StreamConnection(self._state, found).answer(scope, receive, send)

    async def _find(self, asked: Asked, digest: str, owner: str) -> StreamRecord | Reader | None:
        """The answer that there is, or a record for a new one; None where there is no room for one."""
        streams = self._state.streams
        try:
            if asked.last_event is not None:
                return await streams.open(asked.last_event[0], owner, asked.last_event[1], digest)
            if asked.key is not None:
                return await streams.claim(asked.key, digest, owner, asked.keep_s)
            return streams.table.add(owner, digest, asked.keep_s)
        except Exception as error:  # noqa: BLE001 (unknown ones are raised again)
            raise_as_http(error)

    def _start(self, scope: Scope, body: bytes, record: StreamRecord, is_kept: bool) -> None:
        task = asyncio.get_running_loop().create_task(self._generate(scope, body, record, is_kept))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _generate(self, scope: Scope, body: bytes, record: StreamRecord, is_kept: bool) -> None:
        """Runs the request as if its client stayed until the answer is complete, or no reader can come."""
        is_left = partial(is_ending, self._state) if is_kept else None
        recorder = Recorder(record, self._state.streams.table, is_left)
        scope["state"][RECORDER] = recorder
        try:
            await self._app(scope, Replay(body, lambda: abandonment(record)), recorder)
        except ClientDisconnected:
            pass
        except asyncio.CancelledError:
            recorder.fail_unstarted(dataclasses.asdict(server_shutting_down()))
        except Exception as error:  # noqa: BLE001 (any error is the answer)
            if not await recorder.leave():
                recorder.fail_unstarted(dataclasses.asdict(answer_to(error, scope["state"]["request_id"])))
        finally:
            recorder.finish()

    async def _end(self) -> None:
        """Ends what still runs at the end of the server."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def read_headers(headers: Mapping[str, str]) -> Asked:
    """The resumption that the headers, with names in lower case, ask for.

    Raises:
        InvalidRequestError: A value is not permitted.
        HTTPError: 404, the id of the last event is not one of ours.
    """
    key, resume, last_event = map(headers.get, (KEY_HEADER.lower(), RESUME_HEADER, LAST_EVENT_HEADER))
    if key is not None and not (0 < len(key) <= MAX_KEY_CHARS and key.isascii() and key.isprintable()):
        raise request_errors.invalid_value(
            KEY_HEADER, f"expected 1 to {MAX_KEY_CHARS} ASCII characters, no control characters"
        )
    if resume is not None and not (resume.isascii() and resume.isdigit() and 0 < int(resume[:9]) <= MAX_KEEP_S):
        raise request_errors.invalid_value(RESUME_HEADER, f"expected a number of seconds from 1 to {MAX_KEEP_S}")
    keep_s = MAX_KEEP_S if resume is None else int(resume)
    return Asked(key, keep_s, None if last_event is None else read_event_id(last_event))


def read_event_id(text: str) -> tuple[str, int]:
    """The id of a stream and the number of an event.

    Raises:
        HTTPError: 404, it has another form.
    """
    match = _EVENT_ID.fullmatch(text.strip())
    if match is None:
        raise HTTPError(stream_not_found())
    return match.group(1), int(match.group(2))


def _texts(scope: Scope) -> dict[str, str]:
    """The headers of a request, the first ones where a name comes twice; `Headers` looks through all for each."""
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in reversed(scope["headers"])}


def _marked(send: Send) -> Send:
    """A `send` that says that the answer cannot be resumed."""

    def send_marked(message: Message) -> Awaitable[None]:
        if message["type"] == "http.response.start":
            message["headers"].append((RESUMABLE_HEADER.encode(), b"false"))
        return send(message)

    return send_marked
