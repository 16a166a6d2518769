"""The objects of answers about sound, as types for the OpenAPI document."""

from __future__ import annotations

from typing import Literal, NotRequired, TypedDict


class AudioUsage(TypedDict):
    """The cost of a transcript: the length of its sound."""

    type: Literal["duration"]
    seconds: int


class TranscriptToken(TypedDict):
    """A token of a transcript with its log-probability."""

    token: str
    logprob: float
    bytes: list[int]


class TranscriptSegment(TypedDict):
    """A part of a transcript between two times in seconds; `seek` is where its window begins, in hundredths."""

    id: int
    seek: int
    start: float
    end: float
    text: str
    tokens: list[int]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float | None


class TranscriptWord(TypedDict):
    """A word of a transcript, with times in seconds."""

    word: str
    start: float
    end: float


class Transcript(TypedDict):
    """The answer to `POST /v1/audio/transcriptions` and `translations`; all is there with `verbose_json`."""

    text: str
    usage: AudioUsage
    logprobs: NotRequired[list[TranscriptToken]]
    task: NotRequired[str]
    language: NotRequired[str]
    duration: NotRequired[float]
    segments: NotRequired[list[TranscriptSegment]]
    words: NotRequired[list[TranscriptWord]]
