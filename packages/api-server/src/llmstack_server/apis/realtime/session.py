"""One realtime session, from its sound to its words, until one side ends it."""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

from llmstack_llm import request_errors
from llmstack_llm.speech.live import LiveTranscriber
from llmstack_llm.speech.served import Speech
from llmstack_llm.speech.sound import LiveSound
from llmstack_llm.speech.transcriber import Asked
from llmstack_server.apis.audio.prepare import previous_tokens
from llmstack_server.apis.realtime.events import Event, Events, ItemFacts, new_id
from llmstack_server.apis.realtime.settings import (
    DEFAULT_RATES,
    OPENAI,
    UPDATES,
    VLLM,
    Settings,
    needs_update,
    read_update,
)
from llmstack_server.state.server_state import ServerState
from llmstack_server.web.body import decode_body
from llmstack_server.web.checks import adapter_of
from llmstack_server.web.clients import current_client
from llmstack_server.web.errors import (
    HTTPError,
    answer_to,
    engine_unavailable,
    request_too_large,
    server_shutting_down,
    session_idle,
)
from llmstack_server.web.streams import close
from llmstack_server.web.websocket import Received, WebSocketClosed
from llmstack_types import EngineDeadError, InvalidRequestError

MIN_S: Final = 0.1
_MAX_AHEAD_S: Final = 60.0
"""Seconds of sound that wait to be listened to, before no more is read: who sends faster is slowed down."""
_MAX_UNFINISHED: Final = 4
"""Items whose sound has ended, and whose text has not, before no more is read."""
_POLL_S: Final = 0.05
_PCM_BYTES: Final = 2
_SHOWN_CHARS: Final = 64
_LARGE_CHARS: Final = 1 << 16
GOING_AWAY, POLICY_VIOLATION, INTERNAL_ERROR, TRY_AGAIN_LATER = 1001, 1008, 1011, 1013
"""Codes with which a connection is closed."""


class Connection(Protocol):
    """The connection of a session; `WebSocket` is one."""

    async def receive(self) -> Received: ...
    async def send(self, event: Mapping[str, object], timeout_s: float | None = None) -> None: ...
    async def close(self, code: int, reason: str = "") -> None: ...


@dataclass(slots=True)
class _Item:
    facts: ItemFacts
    live: LiveSound
    transcriber: LiveTranscriber
    task: asyncio.Task[None]


class _Ended(Exception):
    """The session ends with an error, and the connection with a code."""

    def __init__(self, error: HTTPError, code: int) -> None:
        super().__init__(error.answer.message)
        self.error = error
        self.code = code


class Session:
    """A session of one connection. `run` runs it, once."""

    def __init__(
        self, state: ServerState, speech: Speech, socket: Connection, request_id: str, model: str | None,
        session_id: str | None = None,
    ) -> None:  # fmt: skip
        """`model`: That of the URL. `session_id`: Of a session whose first event was sent; None of a new one."""
        self._state = state
        self._speech = speech
        self._socket = socket
        self._request_id = request_id
        self._model = model
        self._is_created = session_id is not None
        self._events = Events(session_id or new_id("sess"), state.served_model_name)
        self._settings: Settings | None = None
        self._previous: list[int] = []
        self._item: _Item | None = None
        self._items: set[asyncio.Task[None]] = set()
        self._last_id: str | None = None
        self._num_items = 0
        self._sound_s = 0.0
        self._handlers: Mapping[str, Callable[[Mapping[str, object]], Awaitable[None]]] = {
            **dict.fromkeys(UPDATES, self._update),
            "input_audio_buffer.append": self._append,
            "input_audio_buffer.commit": self._commit,
            "input_audio_buffer.clear": self._clear,
        }

    async def run(self, cut: asyncio.Future[None]) -> None:
        """Runs until the client or the server ends it; `cut` is done once it has to end at once."""
        self._speech.counts.num_sessions += 1
        reading = asyncio.create_task(self._read())
        ending = asyncio.create_task(self._state.in_flight.wait_for_end())
        try:
            with contextlib.suppress(WebSocketClosed):
                if not self._is_created:
                    await self._send(self._events.created(Settings(OPENAI, DEFAULT_RATES[OPENAI], self._model)))
                await asyncio.wait({reading, ending, cut}, return_when=asyncio.FIRST_COMPLETED)
                if reading.done():
                    reading.result()
                reading.cancel()
                await self._finish(cut)
                raise _Ended(HTTPError(server_shutting_down()), GOING_AWAY)
        except _Ended as end:
            with contextlib.suppress(WebSocketClosed):
                await self._send(self._events.error(end.error.answer, None))
            await self._socket.close(end.code, end.error.answer.code or "")
        finally:
            self._speech.counts.num_sessions -= 1
            tasks = [reading, ending, *self._items]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self) -> None:
        """Reads messages; raises WebSocketClosed or `_Ended` at the end."""
        idle_s = self._state.config.http.realtime.idle_timeout_s
        while True:
            await self._wait_until_covered()
            try:
                async with asyncio.timeout(idle_s):
                    message = await self._socket.receive()
            except TimeoutError:
                if self._num_unfinished:
                    continue  # the client waits for the text of what it has committed
                raise _Ended(HTTPError(session_idle(idle_s or 0.0)), POLICY_VIOLATION) from None
            await self._take(message)

    async def _take(self, message: Received) -> None:
        event: Mapping[str, object] = {}
        max_bytes = self._state.config.http.max_body_bytes
        try:
            if message.text is None:
                raise HTTPError(request_too_large(max_bytes))
            event = await decode_body(message.text.encode("utf-8", "replace"), max_bytes, self._state.decoding)
            kind = event.get("type")
            handler = self._handlers.get(kind) if isinstance(kind, str) else None
            if handler is None:
                known = ", ".join(self._handlers)
                raise request_errors.invalid_value("type", f"expected one of {known}")
            await handler(event)
        except (WebSocketClosed, _Ended):
            raise
        except Exception as error:  # noqa: BLE001 (any error of one message, which the session outlives)
            given = event.get("event_id")
            shown = given[:_SHOWN_CHARS] if isinstance(given, str) else None
            await self._send(self._events.error(answer_to(error, self._request_id), shown))

    async def _update(self, event: Mapping[str, object]) -> None:
        settings = read_update(event, self._settings, self._model)
        adapter_of(self._state, settings.model)
        self._speech.check(settings.language)
        if self._item is not None and self._settings is not None and settings.rate != self._settings.rate:
            param = "session.audio.input.format.rate"
            raise request_errors.invalid_value(param, "it cannot change in the middle of an item: commit first")
        self._previous = await previous_tokens(self._state, settings.prompt, "session.audio.input.transcription.prompt")
        self._settings = settings
        for one in self._events.updated(settings, f"{event['type']}d"):
            await self._send(one)

    async def _append(self, event: Mapping[str, object]) -> None:
        settings, audio = self._settings, event.get("audio")
        if settings is None:
            raise needs_update()
        if not isinstance(audio, str):
            raise request_errors.invalid_type("audio", "a string", audio)
        data = await _decoded(audio)
        added_s, max_s = len(data) / _PCM_BYTES / settings.rate, self._state.config.engine.max_audio_seconds
        if self._sound_s + added_s > max_s:
            reason = f"This session has more sound than the {max_s:g} s that are allowed."
            raise InvalidRequestError(reason, param="audio", code="audio_too_long")
        item = self._item if self._item is not None and not self._item.task.done() else await self._begun(settings)
        try:
            await item.live.add(data)
        except InvalidRequestError as error:
            raise InvalidRequestError(error.message, param="audio", code=error.code) from error
        self._sound_s += added_s
        self._speech.counts.session_s += added_s

    async def _commit(self, event: Mapping[str, object]) -> None:
        if self._settings is None:
            raise needs_update()
        is_vllm = self._settings.form == VLLM
        if is_vllm and not event.get("final"):
            return  # text comes before it is asked for
        if self._item is None and is_vllm:
            await self._send(self._events.empty())
            return
        if self._item is None or (self._item.live.duration_s < MIN_S and not is_vllm):
            has_s = 0.0 if self._item is None else self._item.live.duration_s
            message = f"The buffer has {has_s:g} s of sound; {MIN_S:g} s are the least."
            raise InvalidRequestError(message, param="type", code="audio_too_short")
        await self._end_item()

    async def _end_item(self) -> None:
        """Ends the sound of the item, whose text is still to come."""
        item, self._item = self._item, None
        if item is not None:
            for one in self._events.committed(item.facts):
                await self._send(one)
            self._last_id = item.facts.item_id
            await item.live.end()

    async def _clear(self, event: Mapping[str, object]) -> None:
        if self._settings is not None and self._settings.form == VLLM:
            raise request_errors.invalid_value("type", "this form of a session has no input_audio_buffer.clear")
        item, self._item = self._item, None
        if item is not None:
            item.task.cancel()
        await self._send(self._events.cleared())

    async def _begun(self, settings: Settings) -> _Item:
        """A new item, whose words are listened for from now on."""
        client, files = current_client.get(), self._speech.files
        if files is None:
            raise ValueError("the model takes no sound")
        options = {
            "tenant": client.tenant, "cache_salt": client.salt, "param": "audio", "priority": 0,
            "adapter": adapter_of(self._state, settings.model),
        }  # fmt: skip
        self._num_items += 1
        asked = Asked(
            f"realtime-{self._request_id}-{self._num_items}", settings.language, previous=self._previous,
            options=options,
        )  # fmt: skip
        live = await files.begin(settings.rate, client.tenant)
        try:
            transcriber = LiveTranscriber(self._state.engine, self._speech, live, asked)
        except Exception:
            live.close()
            raise
        facts = ItemFacts(new_id("item"), self._last_id)
        task = asyncio.create_task(self._transcribe(facts, live, transcriber))
        self._items.add(task)
        task.add_done_callback(self._items.discard)
        task.add_done_callback(lambda _: live.close())  # also of one that is cancelled before it begins
        self._item = _Item(facts, live, transcriber, task)
        return self._item

    async def _transcribe(self, facts: ItemFacts, live: LiveSound, transcriber: LiveTranscriber) -> None:
        """Sends the text of an item as it comes, and the whole of it in the end."""
        deltas = transcriber.deltas()
        try:
            try:
                async for delta in deltas:
                    await self._send(self._events.delta(facts, delta))
            finally:
                await close(deltas)
            await self._send(self._events.completed(facts, transcriber, live.duration_s))
        except WebSocketClosed:
            pass  # the reader ends the session
        except Exception as error:  # noqa: BLE001 (any error of one item, which the session outlives)
            answer = answer_to(error, self._request_id)
            with contextlib.suppress(WebSocketClosed):
                await self._send(self._events.failed(facts, answer))

    @property
    def _num_unfinished(self) -> int:
        """Items whose sound has ended and whose text is still to come."""
        return len(self._items) - (self._item is not None and not self._item.task.done())

    async def _wait_until_covered(self) -> None:
        """Returns once what was sent is nearly transcribed, so that a session keeps little waiting."""
        max_ahead = int(_MAX_AHEAD_S * self._speech.sample_rate)
        while True:
            item = self._item
            ahead = 0
            if item is not None and not item.task.done():
                ahead = item.live.num_samples - item.transcriber.num_covered
            if ahead <= max_ahead and self._num_unfinished < _MAX_UNFINISHED:
                return
            await self._check_engine()
            await asyncio.sleep(_POLL_S)

    async def _check_engine(self) -> None:
        try:
            await self._state.engine.check_health()
        except EngineDeadError:
            raise _Ended(HTTPError(engine_unavailable("The engine is gone.")), INTERNAL_ERROR) from None

    async def _finish(self, cut: asyncio.Future[None]) -> None:
        """Ends the sound and sends the rest of the text, unless the session has to end at once."""
        if cut.done():
            return
        await self._end_item()
        if self._items:
            finishing: asyncio.Future[Any] = asyncio.gather(*self._items, return_exceptions=True)
            await asyncio.wait({finishing, cut}, return_when=asyncio.FIRST_COMPLETED)

    async def _send(self, event: Event) -> None:
        await self._socket.send(event, self._state.config.http.send_timeout_s)


async def _decoded(audio: str) -> bytes:
    """The bytes of base64; raises InvalidRequestError where it is none."""
    try:
        if len(audio) > _LARGE_CHARS:
            return await asyncio.to_thread(base64.b64decode, audio, validate=True)
        return base64.b64decode(audio, validate=True)
    except (ValueError, binascii.Error):
        raise InvalidRequestError("This audio is no base64.", param="audio", code="invalid_audio") from None
