"""Events that a realtime session sends, in OpenAI's form and in vLLM's."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

from llmstack_llm.speech.live import LiveTranscriber
from llmstack_server.apis.audio.answer import logprobs_of
from llmstack_server.apis.realtime.settings import OPENAI, Settings
from llmstack_server.web.errors import ErrorAnswer
from llmstack_types.json_values import JSONValue

Event = Mapping[str, JSONValue]
_TRANSCRIPTION: Final = "conversation.item.input_audio_transcription"


class ItemFacts(NamedTuple):
    """An item of a session: the sound between two commits.

    Attributes:
        previous_id: The item before it.
    """

    item_id: str
    previous_id: str | None


def new_id(prefix: str) -> str:
    """A random id behind a prefix."""
    return f"{prefix}_{uuid.uuid4().hex}"


class Events:
    """Makes the events of one session, in the form of its first `session.update`."""

    def __init__(self, session_id: str, served_model: str) -> None:
        self._session_id = session_id
        self._served_model = served_model
        self._settings: Settings | None = None

    @property
    def _is_openai(self) -> bool:
        return self._settings is None or self._settings.form == OPENAI

    def created(self, settings: Settings) -> Event:
        """The first event, which has the fields of both forms; `settings` are the defaults."""
        session = settings.as_session(self._session_id, self._served_model)
        return _event("session.created", session=session, id=self._session_id, created=int(time.time()))

    def updated(self, settings: Settings, kind: str = "session.updated") -> Iterator[Event]:
        """Events after an update, of this type; later events have its form."""
        self._settings = settings
        if self._is_openai:
            yield _event(kind, session=settings.as_session(self._session_id, self._served_model))

    def delta(self, item: ItemFacts, text: str) -> Event:
        """Further text of an item."""
        if self._is_openai:
            return _event(f"{_TRANSCRIPTION}.delta", item_id=item.item_id, content_index=0, delta=text)
        return {"type": "transcription.delta", "delta": text}

    def committed(self, item: ItemFacts) -> Iterator[Event]:
        """Events after the end of an item's sound."""
        if self._is_openai:
            yield _event("input_audio_buffer.committed", item_id=item.item_id, previous_item_id=item.previous_id)
            content = {"type": "input_audio", "transcript": None}
            shown = {
                "id": item.item_id, "object": "realtime.item", "type": "message", "status": "completed", "role": "user",
                "content": [content],
            }  # fmt: skip
            for kind in ("added", "done"):
                yield _event(f"conversation.item.{kind}", item=shown, previous_item_id=item.previous_id)

    def cleared(self) -> Event:
        """The answer to `input_audio_buffer.clear`."""
        return _event("input_audio_buffer.cleared")

    def completed(self, item: ItemFacts, transcriber: LiveTranscriber, duration_s: float) -> Event:
        """The whole text of an item."""
        if self._is_openai:
            has_logprobs = self._settings is not None and self._settings.has_logprobs
            shown: dict[str, object] = {"logprobs": logprobs_of(transcriber.settled)} if has_logprobs else {}
            usage = {"type": "duration", "seconds": round(duration_s, 3)}
            return _event(
                f"{_TRANSCRIPTION}.completed", item_id=item.item_id, content_index=0, transcript=transcriber.text,
                usage=usage, **shown,
            )  # fmt: skip
        num_prompt, num_output = transcriber.num_prompt_tokens, transcriber.num_output_tokens
        usage = {"prompt_tokens": num_prompt, "completion_tokens": num_output, "total_tokens": num_prompt + num_output}
        return {"type": "transcription.done", "text": transcriber.text, "usage": usage}

    def empty(self) -> Event:
        """vLLM's answer to the end of no sound."""
        usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
        return {"type": "transcription.done", "text": "", "usage": usage}

    def failed(self, item: ItemFacts, answer: ErrorAnswer) -> Event:
        """The end of an item that has no text."""
        if self._is_openai:
            error = answer.body()["error"]
            return _event(f"{_TRANSCRIPTION}.failed", item_id=item.item_id, content_index=0, error=error)
        return self.error(answer, None)

    def error(self, answer: ErrorAnswer, client_event_id: str | None) -> Event:
        """An error, with the id that the client gave the event that it is about."""
        if self._is_openai:
            error: Any = answer.body()["error"]
            return _event("error", error={**error, "event_id": client_event_id})
        return {"type": "error", "error": answer.message, "code": answer.code, "param": answer.param}


def _event(kind: str, **fields: object) -> Event:
    return {"type": kind, "event_id": new_id("event"), **fields}
