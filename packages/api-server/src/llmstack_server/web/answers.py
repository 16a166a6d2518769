"""Responses of generating routes: whole or streamed, ended with their client."""

from __future__ import annotations

import asyncio
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from llmstack_llm import RequestOutput, request_errors
from llmstack_server.state.queue_monitor import current_request
from llmstack_server.state.server_state import ServerState
from llmstack_server.web.body import BodyLimits, ClientDisconnected, read_json_object
from llmstack_server.web.clients import current_client
from llmstack_server.web.errors import ErrorAnswer, HTTPError, answer_to, engine_unavailable, server_shutting_down
from llmstack_server.web.keep_alive import COMMENT, EventSender
from llmstack_server.web.openapi import EVENTS
from llmstack_server.web.pauses import encoded
from llmstack_server.web.recording import RECORDER, Recorder
from llmstack_server.web.routes import Needs, spec_of
from llmstack_server.web.sse import DONE, Events, encode_json, frame
from llmstack_server.web.streams import close
from llmstack_types import ServerOverloadedError, TenantLimitError
from llmstack_types.json_values import JSONObject

MAX_REQUEST_ID_CHARS = 128
STREAM_HEADERS = {
    "content-type": f"{EVENTS}; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}
PREDICTED_WAIT_HEADER = "x-llmstack-predicted-wait-ms"
PREDICTED_TTFT_HEADER = "x-llmstack-predicted-ttft-ms"


Push = Callable[[Callable[[RequestOutput], Events], RequestOutput], bool]
"""Encodes and sends an output at once, as `EventSender.push` does; False where that would wait."""


class WholeAnswer(ABC):
    """A request that has passed every check; nothing runs before its answer is awaited.

    Attributes:
        is_stream: Whether the client asked for a stream, which only an `Answer` has.
        media_type: Of the whole answer.
    """

    is_stream: bool = False
    media_type: str = "application/json"

    @abstractmethod
    async def whole(self) -> JSONObject | bytes | list[bytes]:
        """The answer as one object, or encoded, in one part or several."""


class Answer(WholeAnswer):
    """An answer that can be streamed.

    Attributes:
        end: The bytes after the last event.
        stream_type: The content type of a stream.
        comment: Sent while there is nothing else to send; empty for a form without comments.
    """

    end: bytes = DONE
    stream_type: str = STREAM_HEADERS["content-type"]
    comment: bytes = COMMENT

    @property
    def is_failed(self) -> bool:
        """Whether an answer counts as failed, though all its events were sent; it is not remembered."""
        return False

    @abstractmethod
    def events(self) -> AsyncIterator[Events]:
        """The answer as framed events, without the end."""

    def push_by(self, push: Push) -> None:
        """Has outputs sent as they come, after the first event and while the next of `events` is awaited.

        Where this is not overridden, `events` has all of them.
        """

    def error_event(self, error: ErrorAnswer) -> bytes:
        """The last event of a stream that failed after its start, in the form of its API."""
        return frame(encode_json(error.body()))


Prepare = Callable[[ServerState, JSONObject], Awaitable[WholeAnswer]]


def closed_by_operator(state: ServerState) -> ErrorAnswer:
    """The answer to requests for the model while weights change, or an operator has paused the server."""
    if state.is_updating_weights:
        return engine_unavailable("The weights are being changed.")
    return engine_unavailable("The server is paused: POST /resume ends that.")


def _is_for_model(scope: Scope) -> bool:
    return spec_of(scope["route"]).needs is Needs.SERVICE


def endpoint(state: ServerState, prepare: Prepare) -> Callable[[], Awaitable[Response]]:
    """The function of a generating route, whose answer `prepare` makes."""

    async def answer() -> Response:
        return GenerationResponse(state, prepare)

    return answer


class GenerationResponse(Response):
    """The response of a generating route: everything from the body to the last event.

    Headers are sent with the first output, so that an earlier error has its own status; or with the first comment
    where that takes long.
    """

    def __init__(self, state: ServerState, prepare: Prepare) -> None:
        super().__init__()
        self._state = state
        self._prepare = prepare
        self._sender: EventSender | Recorder | None = None
        self._streamed: Answer | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send, body: JSONObject | None = None) -> None:
        """Answers one request; its errors before the first byte are raised.

        `body`: Its fields, if they are read already.

        Raises:
            ClientDisconnected: The client has disconnected.
        """
        if body is None:
            limits = BodyLimits(self._state.config.http.max_body_bytes, self._state.config.http.receive_timeout_s)
            body = await read_json_object(
                Headers(scope=scope), receive, limits, self._state.decoding,
                takes_untyped=spec_of(scope["route"]).takes_untyped,
            )  # fmt: skip
        if (self._state.is_updating_weights or self._state.is_paused) and _is_for_model(scope):
            raise HTTPError(closed_by_operator(self._state))  # since the body was awaited, which is not in flight
        with self._state.in_flight.track() as cut:
            try:
                recorder: Recorder | None = scope["state"].get(RECORDER)
                # The end of the client of an answer that is kept needs no task that waits for a message.
                if recorder is not None:
                    await run_until(self._answer(body, recorder, recorder), recorder.left, cut)
                else:
                    await run_while_connected(self._answer(body, send, None), receive, cut)
            except ClientDisconnected:
                raise
            except Exception as error:  # any error becomes the last event of a started stream
                if isinstance(error, ServerOverloadedError):
                    self._state.metrics.count_rejection(error.reason)
                if isinstance(error, TenantLimitError):
                    self._state.metrics.count_rejection("constraints")
                if self._sender is None or not self._sender.has_started:
                    raise
                await self._end_with_error(error, scope["state"]["request_id"], self._sender)

    async def _answer(self, body: JSONObject, send: Send, recorder: Recorder | None) -> None:
        answer = await self._prepare(self._state, body)
        if answer.is_stream and isinstance(answer, Answer):
            self._streamed = answer
            await self._send_events(answer, send, recorder)
        else:
            whole = await answer.whole()
            parts = whole if isinstance(whole, list) else [whole] if isinstance(whole, bytes) else await encoded(whole)
            await self._send_whole(parts, answer.media_type, send)

    async def _send_whole(self, parts: list[bytes], media_type: str, send: Send) -> None:
        num_bytes = str(sum(map(len, parts))).encode()
        headers = [(b"content-type", media_type.encode()), (b"content-length", num_bytes), *_prediction_headers()]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for part in parts[:-1]:
            await send({"type": "http.response.body", "body": part, "more_body": True})
            await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": parts[-1]})

    async def _send_events(self, answer: Answer, send: Send, recorder: Recorder | None) -> None:
        events = answer.events()
        named = STREAM_HEADERS | {"content-type": answer.stream_type}
        headers = [*((name.encode(), value.encode()) for name, value in named.items()), *_prediction_headers()]
        if recorder is not None:
            recorder.begin_stream(headers)
        sender = self._sender = recorder or EventSender(send, headers, comment=answer.comment)
        try:
            pushes = sender.can_push  # otherwise outputs would only come to their consumer later
            try:
                async for event in events:
                    await sender.event(event)
                    if pushes:
                        answer.push_by(sender.push)
                        pushes = False
            finally:
                await sender.stop()
                await close(events)
            if answer.is_failed:
                sender.forget()
            await sender.end(answer.end)
        finally:
            request = current_request.get()
            if request is not None and not request.is_recorded:
                self._state.slow_readers.note(request.request_id, request.tenant, sender.waited_s)

    async def _end_with_error(self, error: Exception, request_id: str, sender: EventSender | Recorder) -> None:
        """Sends the error as the last event without `[DONE]`, so that the answer is visibly incomplete."""
        if self._streamed is not None:
            event = self._streamed.error_event(answer_to(error, request_id))
            if self._streamed.is_failed:
                sender.forget()
            await sender.fail(event)


def _prediction_headers() -> list[tuple[bytes, bytes]]:
    """Headers with the predicted wait and first token of the current request; none before steps were measured."""
    request, headers = current_request.get(), []
    if request is not None and request.wait_s is not None:
        headers.append((PREDICTED_WAIT_HEADER.encode(), b"%d" % round(request.wait_s * 1000)))
    if request is not None and request.prediction is not None:
        headers.append((PREDICTED_TTFT_HEADER.encode(), b"%d" % round(request.prediction.ttft_s * 1000)))
    return headers


async def run_while_connected(
    work: Coroutine[object, object, None], receive: Receive, cut: asyncio.Future[None]
) -> None:
    """Runs `work` until it is done, its client disconnects, or the server cuts requests in flight."""
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_wait_until_disconnected(receive))
    try:
        await asyncio.wait((working, leaving, cut), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
        elif leaving.done():
            raise ClientDisconnected
        else:
            raise HTTPError(server_shutting_down())
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def run_here_while_connected(
    work: Coroutine[object, object, None], receive: Receive, cut: asyncio.Future[None]
) -> None:
    """As `run_while_connected`, in the current task, so that the work begins at once."""
    leaving = asyncio.create_task(_wait_until_disconnected(receive))
    try:
        await run_until(work, leaving, cut)
    finally:
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)


async def run_until(
    work: Coroutine[object, object, None], left: asyncio.Future[None], cut: asyncio.Future[None]
) -> None:
    """Runs `work` in the current task until it is done, `left` is done, or the server cuts requests in flight.

    A task of its own for the work would cost a request some ten microseconds.

    Raises:
        ClientDisconnected: `left` was done first.
        HTTPError: 503, `cut` was done first.
    """
    task = asyncio.current_task()
    ended_by: asyncio.Future[None] | None = None
    is_over = False

    def end(by: asyncio.Future[None]) -> None:  # called by the event loop, so the task waits for something
        nonlocal ended_by
        if task is not None and ended_by is None and not is_over:
            ended_by = by
            task.cancel()

    num_cancelling = 0 if task is None else task.cancelling()
    left.add_done_callback(end)
    cut.add_done_callback(end)
    try:
        await work
    except BaseException as error:
        if task is None or ended_by is None:
            raise
        is_cancelled_too = task.uncancel() > num_cancelling
        if is_cancelled_too and isinstance(error, asyncio.CancelledError):
            raise
        raise (ClientDisconnected() if ended_by is left else HTTPError(server_shutting_down())) from None
    else:
        if task is not None and ended_by is not None:
            task.uncancel()
    finally:
        is_over = True
        left.remove_done_callback(end)
        cut.remove_done_callback(end)


async def _wait_until_disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def new_id(prefix: str) -> str:
    """A new id; never the client's, which may occur twice."""
    return f"{prefix}-{uuid.uuid4().hex}"


@dataclass(frozen=True, slots=True)
class AnswerIds:
    """The id that an answer carries, and the one that its request has in the engine: the first may come twice."""

    answer: str
    engine: str


def answer_ids(prefix: str, given: str | None) -> AnswerIds:
    """Fresh ids, or such as begin with what the client gave.

    Raises:
        InvalidRequestError: It is too long, or has characters that a log should not show.
    """
    if given is None:
        fresh = f"{prefix}-{uuid.uuid4().hex}"
        return AnswerIds(fresh, fresh)
    if not 0 < len(given) <= MAX_REQUEST_ID_CHARS or not all("!" <= char <= "~" for char in given):
        reason = f"expected 1 to {MAX_REQUEST_ID_CHARS} visible ASCII characters"
        raise request_errors.invalid_value("request_id", reason)
    return AnswerIds(f"{prefix}-{given}", new_id(f"{prefix}-{given}"))


async def claim_ids(state: ServerState, prefix: str, given: str | None) -> AnswerIds:
    """The ids of an answer. What the client gave is taken until the answer ends; a second one of the key is refused."""
    ids = answer_ids(prefix, given)
    if given is not None:
        await state.request_ids.claim(current_client.get().tenant, given)
    return ids
