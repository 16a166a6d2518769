"""Answers to transcriptions: whole in one of five formats, or as events."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from llmstack_llm.speech.segments import Segment
from llmstack_llm.speech.sound import Sound
from llmstack_llm.speech.subtitles import srt, text_of, vtt
from llmstack_llm.speech.transcriber import Transcriber
from llmstack_server.chat.logprobs import floor, token_name
from llmstack_server.state.server_state import ServerState
from llmstack_server.web.answers import Answer
from llmstack_server.web.deadlines import timed
from llmstack_server.web.sse import encode_json, frame
from llmstack_server.web.streams import close
from llmstack_types.json_values import JSONObject

_AUDIO_TOKENS_PER_S: Final = 50
"""Vectors of an encoder for a second of sound."""
_TEXTS: Final[Mapping[str, Callable[[Sequence[Segment]], str]]] = {
    "srt": srt, "vtt": vtt, "text": lambda segments: f"{text_of(segments)}\n",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Shown:
    """The parts of a transcript that an answer shows.

    Attributes:
        granularities: What has times in `verbose_json`: `segment`, `word`; empty for segments alone.
    """

    response_format: str
    task: str
    granularities: tuple[str, ...]
    is_stream: bool
    has_logprobs: bool


class AudioAnswer(Answer):
    """The answer to one file, whose sound is closed at its end."""

    def __init__(self, state: ServerState, shown: Shown, sound: Sound, transcriber: Transcriber) -> None:
        self.is_stream = shown.is_stream
        if shown.response_format in _TEXTS:
            self.media_type = "text/plain; charset=utf-8"
        self._state = state
        self._shown = shown
        self._sound = sound
        self._transcriber = transcriber

    async def whole(self) -> JSONObject | bytes:
        """The transcript in its format."""
        segments = [segment async for segment in self._segments()]
        as_text = _TEXTS.get(self._shown.response_format)
        if as_text is not None:
            return as_text(segments).encode("utf-8", "replace")
        usage = {"type": "duration", "seconds": math.ceil(self._sound.duration_s)}
        common = {"text": text_of(segments), "usage": usage, **self._logprobs(segments)}
        if self._shown.response_format == "json":
            return common
        return {
            "task": self._shown.task,
            "language": self._transcriber.language or "en",
            "duration": round(self._sound.duration_s, 3),
            **common,
            **self._timed(segments),
        }

    def _timed(self, segments: Sequence[Segment]) -> dict[str, object]:
        granularities, timed_parts = self._shown.granularities or ("segment",), dict[str, Any]()
        if "segment" in granularities:
            timed_parts["segments"] = [_as_object(index, segment) for index, segment in enumerate(segments)]
        if "word" in granularities:
            timed_parts["words"] = [
                {"word": word.text.strip(), "start": round(word.start_s, 3), "end": round(word.end_s, 3)}
                for segment in segments
                for word in segment.words
            ]
        return timed_parts

    async def events(self) -> AsyncIterator[bytes]:
        """A delta for each segment, then the whole text with what it has cost. All deltas together are the text."""
        segments: list[Segment] = []
        text = ""
        async for segment in self._segments():
            segments.append(segment)
            whole = text_of(segments)
            yield _event("delta", delta=whole[len(text) :], **self._logprobs([segment]))
            text = whole
        yield _event("done", text=text, **self._logprobs(segments), usage=self._token_usage())

    async def _segments(self) -> AsyncIterator[Segment]:
        segments = timed(self._transcriber.segments(), self._state.config.http.request_timeout_s)
        try:
            async for segment in segments:
                yield segment
        finally:
            await close(segments)
            self._sound.close()

    def _logprobs(self, segments: Sequence[Segment]) -> dict[str, object]:
        if not self._shown.has_logprobs:
            return {}
        return {"logprobs": logprobs_of(segments)}

    def _token_usage(self) -> dict[str, object]:
        num_audio = math.ceil(self._sound.duration_s * _AUDIO_TOKENS_PER_S)
        num_text, num_output = self._transcriber.num_prompt_tokens, self._transcriber.num_output_tokens
        return {
            "type": "tokens", "input_tokens": num_audio + num_text, "output_tokens": num_output,
            "total_tokens": num_audio + num_text + num_output,
            "input_token_details": {"audio_tokens": num_audio, "text_tokens": num_text},
        }  # fmt: skip


def logprobs_of(segments: Sequence[Segment]) -> list[dict[str, object]]:
    """The tokens of segments with their log-probabilities."""
    return [_token(*pair) for one in segments for pair in zip(one.token_ids, one.logprobs, strict=True)]


def _event(kind: str, **fields: object) -> bytes:
    return frame(encode_json({"type": f"transcript.text.{kind}", **fields}))


def _token(token_id: int, entry: Any) -> JSONObject:
    text = token_name(token_id) if entry.decoded_token is None else entry.decoded_token
    raw = text.encode() if entry.token_bytes is None else entry.token_bytes
    return {"token": text, "logprob": floor(entry.logprob), "bytes": list(raw)}


def _as_object(index: int, segment: Segment) -> dict[str, object]:
    return {
        "id": index,
        "seek": round(segment.seek_s * 100),
        "start": round(segment.start_s, 3),
        "end": round(segment.end_s, 3),
        "text": segment.text,
        "tokens": list(segment.token_ids),
        "temperature": segment.temperature,
        "avg_logprob": floor(segment.avg_logprob),
        "compression_ratio": round(segment.compression_ratio, 4),
        "no_speech_prob": segment.no_speech_prob,
    }
