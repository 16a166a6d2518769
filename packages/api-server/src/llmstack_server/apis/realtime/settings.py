"""Settings of a realtime session: `session.update` in both forms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from llmstack_llm import request_errors
from llmstack_server.web.unsupported import OneOf, one_of
from llmstack_types import InvalidRequestError

OPENAI, VLLM = "openai", "vllm"
BETA_UPDATE: Final = "transcription_session.update"
UPDATES: Final = ("session.update", BETA_UPDATE)
"""The events that say what a session is for; the second one is that of OpenAI's first transcription sessions."""
RATES: Final = (16_000, 24_000, 48_000)
DEFAULT_RATES: Final[Mapping[str, int]] = {OPENAI: 24_000, VLLM: 16_000}
LOGPROBS: Final = "item.input_audio_transcription.logprobs"
_INPUT: Final = "session.audio.input"
_TRANSCRIPTION: Final = f"{_INPUT}.transcription"
_UNSUPPORTED: Final[Mapping[str, Mapping[str, OneOf]]] = {
    _INPUT: {"noise_reduction": one_of(), "turn_detection": one_of()},
    _TRANSCRIPTION: {"keywords": one_of([]), "languages": one_of([]), "delay": one_of()},
}
_REASONS: Final[Mapping[str, str]] = {
    "turn_detection": "this server does not find turns: set it to null, and commit each one",
    "delay": "text comes as soon as two drafts agree on it",
}


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings for the items of a session.

    Attributes:
        form: `OPENAI` or `VLLM`.
        rate: Samples per second of what is sent, in Hz.
        model: None for the served one.
        language: A code; None lets the model decide.
        prompt: A text that goes before, such as one that spells names.
        has_logprobs: Whether transcripts have the log-probabilities of their tokens.
    """

    form: str
    rate: int
    model: str | None = None
    language: str | None = None
    prompt: str | None = None
    has_logprobs: bool = False

    def as_session(self, session_id: str, model: str) -> dict[str, object]:
        """The session as OpenAI's API shows it; `model` is the served one."""
        transcription = {"model": self.model or model or None, "language": self.language, "prompt": self.prompt}
        return {
            "type": "transcription",
            "object": "realtime.transcription_session",
            "id": session_id,
            "audio": {
                "input": {
                    "format": {"type": "audio/pcm", "rate": self.rate},
                    "transcription": transcription,
                    "noise_reduction": None,
                    "turn_detection": None,
                }
            },
            "include": [LOGPROBS] if self.has_logprobs else [],
        }


def read_update(event: Mapping[str, object], before: Settings | None, model: str | None) -> Settings:
    """The settings after an event: those of `before`, but for what it names.

    Args:
        event: Of one of the types `UPDATES`; its form is OpenAI's if it has a `session`, else vLLM's.
        before: Of the session so far; None where there was no event yet.
        model: That of the URL.

    Raises:
        InvalidRequestError: It has another form than the one before, or a value that is not available.
    """
    form = OPENAI if "session" in event else VLLM
    if before is not None and before.form != form:
        raise request_errors.invalid_value("session", "a session keeps the form of its first session.update")
    now = before or Settings(form, DEFAULT_RATES[form], model)
    if form == VLLM:
        return _read_vllm(event, now)
    session = _object(event, "session")
    return _read_openai(_from_beta(session) if event.get("type") == BETA_UPDATE else session, now)


def _from_beta(session: Mapping[str, object]) -> Mapping[str, object]:
    """The fields of `transcription_session.update` where `session.update` has them."""
    form = _text(session, "input_audio_format", "session.input_audio_format", "pcm16")
    if form not in ("pcm16", None):
        raise request_errors.unsupported_value(
            "session.input_audio_format", "expected pcm16, at 24,000 samples a second"
        )
    given = {
        "transcription": session.get("input_audio_transcription"),
        "noise_reduction": session.get("input_audio_noise_reduction"),
        "turn_detection": session.get("turn_detection"),
    }
    return {"audio": {"input": given}, "include": session.get("include")}


def _read_vllm(event: Mapping[str, object], now: Settings) -> Settings:
    return Settings(VLLM, now.rate, _text(event, "model", "model", now.model))


def _read_openai(session: Mapping[str, object], now: Settings) -> Settings:
    kind = _text(session, "type", "session.type", "transcription")
    if kind != "transcription":
        raise request_errors.unsupported_value("session.type", "this server has transcription sessions only")
    given = _object(_object(session, "audio", "session.audio"), "input", _INPUT)
    _refuse(given, _INPUT)
    rate = _read_format(given, now.rate)
    asked = _object(given, "transcription", _TRANSCRIPTION)
    _refuse(asked, _TRANSCRIPTION)
    model, language, prompt = (
        _text(asked, name, f"{_TRANSCRIPTION}.{name}", getattr(now, name)) for name in ("model", "language", "prompt")
    )
    language = language.strip().lower() if language else None
    return Settings(OPENAI, rate, model, language, prompt or None, _has_logprobs(session, default=now.has_logprobs))


def _read_format(given: Mapping[str, object], rate: int) -> int:
    name = f"{_INPUT}.format"
    form = _object(given, "format", name)
    if _text(form, "type", f"{name}.type", "audio/pcm") != "audio/pcm":
        raise request_errors.unsupported_value(
            f"{name}.type", "expected audio/pcm: 16 bits, little-endian, one channel"
        )
    found = form.get("rate")
    if found is None:
        return rate
    if type(found) is not int or found not in RATES:
        raise request_errors.unsupported_value(f"{name}.rate", f"expected one of {', '.join(map(str, RATES))}")
    return found


def _has_logprobs(session: Mapping[str, object], *, default: bool) -> bool:
    include = session.get("include")
    if include is None:
        return default
    if not isinstance(include, list) or any(one != LOGPROBS for one in include):
        raise request_errors.invalid_value("session.include", f"expected a list of '{LOGPROBS}'")
    return bool(include)


def _refuse(given: Mapping[str, object], path: str) -> None:
    for name, is_harmless in _UNSUPPORTED[path].items():
        if not is_harmless(given.get(name)):
            reason = _REASONS.get(name, "it is not available")
            raise request_errors.unsupported_parameter(f"{path}.{name}", reason)


def _object(given: Mapping[str, object], name: str, param: str = "") -> Mapping[str, object]:
    """The object of a name; an empty one where there is none."""
    found = given.get(name)
    if found is not None and not isinstance(found, dict):
        raise request_errors.invalid_type(param or name, "an object", found)
    return found or {}


def _text(given: Mapping[str, object], name: str, param: str, default: str | None) -> str | None:
    """The string of a name; the default where it is not named, and None where it is null."""
    if name not in given:
        return default
    found = given[name]
    if found is not None and not isinstance(found, str):
        raise request_errors.invalid_type(param, "a string", found)
    return found


def needs_update() -> InvalidRequestError:
    """The error for sound that comes before the first `session.update`."""
    message = "Send session.update first: it says what the sound is, and which model transcribes it."
    return InvalidRequestError(message, param="type", code="invalid_value")
