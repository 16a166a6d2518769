"""Checks of a transcription, and the decode of its file."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import BinaryIO, Final

from llmstack_llm import request_errors
from llmstack_llm.speech.served import Speech
from llmstack_llm.speech.sound import Sound
from llmstack_llm.speech.transcriber import Asked, Transcriber
from llmstack_server.apis.audio.answer import AudioAnswer, Shown
from llmstack_server.apis.audio.protocol import (
    GRANULARITIES,
    INCLUDES,
    RESPONSE_FORMATS,
    SAMPLING,
    TRANSCRIPTIONS,
    TRANSLATIONS,
    AudioRequest,
    TranscriptionRequest,
    TranslationRequest,
)
from llmstack_server.state.server_state import ServerState
from llmstack_server.web.answers import claim_ids
from llmstack_server.web.checks import adapter_of, check_fields
from llmstack_server.web.clients import current_client
from llmstack_server.web.deadlines import engine_deadline_s
from llmstack_server.web.errors import missing_parameter
from llmstack_server.web.fields import parse
from llmstack_server.web.first_token_check import check_first_token
from llmstack_server.web.unsupported import check_word
from llmstack_types import InvalidRequestError

_NAMES: Final = {"max_tokens": "max_completion_tokens"}
_STREAMED: Final = ("json", "text")
MAX_PROMPT_CHARS: Final = 8192


@dataclass(frozen=True, slots=True)
class UploadedSound:
    """The file of a form, which is closed when its request ends."""

    file: BinaryIO


async def prepare_transcription(state: ServerState, body: dict[str, object]) -> AudioAnswer:
    """Checks a request for a transcript in the language that is spoken; raises as `prepare_translation`."""
    fields = parse(TranscriptionRequest, body)
    check_fields(state, body, fields, TRANSCRIPTIONS)
    granularities = _words("timestamp_granularities", fields.timestamp_granularities, GRANULARITIES)
    includes = _words("include", fields.include, INCLUDES)
    return await _prepare(state, fields, "transcribe", granularities, has_logprobs=bool(includes))


async def prepare_translation(state: ServerState, body: dict[str, object]) -> AudioAnswer:
    """Checks a request for a transcript in English, and decodes its file.

    Raises:
        InvalidRequestError: Names the first invalid field, or says what is wrong with the file.
        ServerOverloadedError: There is no room for the file.
    """
    fields = parse(TranslationRequest, body)
    check_fields(state, body, fields, TRANSLATIONS)
    return await _prepare(state, fields, "translate", (), has_logprobs=False)


async def speech_of(state: ServerState) -> Speech:
    """The windows and prompts of the served model.

    Raises:
        InvalidRequestError: It does not transcribe.
        EngineStartError, EngineDeadError: The engine core is not there.
    """
    await state.engine.wait_until_ready()
    speech = state.engine.speech
    if speech is None or speech.files is None:
        message = "The model does not support the Audio API: it does not transcribe speech."
        raise InvalidRequestError(message, param="model", code="unsupported_value")
    return speech


async def _prepare(
    state: ServerState, fields: TranslationRequest, task: str, granularities: tuple[str, ...], *, has_logprobs: bool
) -> AudioAnswer:
    speech = await speech_of(state)
    if fields.model is None:
        raise missing_parameter("model")
    if "word" in granularities and not state.engine.limits.alignment_size:
        reason = "no heads of this model follow the sound, or --pipeline-parallel-size divides its layers"
        raise request_errors.unsupported_parameter("timestamp_granularities", reason)
    shown = _shown(fields, task, granularities, has_logprobs=has_logprobs)
    sampling = _sampling(fields)
    temperature = None if fields.temperature is None else float(fields.temperature)
    given = sampling if temperature is None else {**sampling, "temperature": fields.temperature}
    state.engine.check_sampling(given, _NAMES)
    language = fields.language.strip().lower() if fields.language else None
    speech.check(language, task)
    previous = await previous_tokens(state, fields.prompt)
    ids = await claim_ids(state, "transcribe", fields.request_id)
    asked = Asked(
        ids.engine, language, task, previous, bool(fields.condition_on_previous_text), temperature, sampling,
        has_no_speech_prob=shown.response_format == "verbose_json", has_words="word" in granularities,
        options=_options(state, fields),
        on_admitted=functools.partial(check_first_token, state, f"{ids.engine}-1"),
    )  # fmt: skip
    sound = await _sound(speech, fields)
    return AudioAnswer(state, shown, sound, Transcriber(state.engine, speech, sound, asked))


def _words(param: str, given: list[str] | None, known: tuple[str, ...]) -> tuple[str, ...]:
    for index, word in enumerate(given or ()):
        check_word(f"{param}[{index}]", word, known)
    return tuple(given or ())


def _shown(fields: AudioRequest, task: str, granularities: tuple[str, ...], *, has_logprobs: bool) -> Shown:
    """The parts of a transcript that the answer shows; combinations that no answer has are refused."""
    if fields.response_format == "diarized_json":
        raise request_errors.unsupported_parameter("response_format", "this model does not tell speakers apart")
    check_word("response_format", fields.response_format, RESPONSE_FORMATS)
    response_format = fields.response_format or "json"
    if fields.stream and response_format not in _STREAMED:
        reason = f"only {' and '.join(_STREAMED)} are available together with 'stream': true"
        raise request_errors.invalid_value("response_format", reason)
    if granularities and response_format != "verbose_json":
        reason = "it is only allowed together with 'response_format': 'verbose_json'"
        raise request_errors.invalid_value("timestamp_granularities", reason)
    if has_logprobs and response_format not in ("json", "verbose_json"):
        reason = "logprobs are only available with the formats json and verbose_json"
        raise request_errors.invalid_value("include", reason)
    return Shown(response_format, task, granularities, is_stream=bool(fields.stream), has_logprobs=has_logprobs)


def _sampling(fields: AudioRequest) -> dict[str, object]:
    if fields.n not in (None, 1) and not fields.use_beam_search:
        raise request_errors.invalid_value("n", "it is only allowed together with 'use_beam_search'")
    sampling = {name: value for name in SAMPLING if (value := getattr(fields, name)) is not None}
    if fields.max_completion_tokens is not None:
        sampling["max_tokens"] = fields.max_completion_tokens
    return sampling


def _options(state: ServerState, fields: AudioRequest) -> Mapping[str, object]:
    client = current_client.get()
    return {
        "tenant": client.tenant, "cache_salt": client.salt + (fields.cache_salt or ""), "param": "file",
        "priority": fields.priority or 0, "deadline_s": engine_deadline_s(), "adapter": adapter_of(state, fields.model),
    }  # fmt: skip


async def previous_tokens(state: ServerState, prompt: str | None, param: str = "prompt") -> list[int]:
    """The tokens of the text that goes before; the model keeps those that fit.

    Raises:
        InvalidRequestError: It is too long.
    """
    if not prompt or not prompt.strip():
        return []
    if len(prompt) > MAX_PROMPT_CHARS:
        raise request_errors.string_too_long(param, MAX_PROMPT_CHARS, len(prompt))
    return await state.engine.tokenize(f" {prompt.strip()}", add_special_tokens=False)


async def _sound(speech: Speech, fields: AudioRequest) -> Sound:
    tenant = current_client.get().tenant
    if speech.files is None:
        raise ValueError("the model takes no files")
    if isinstance(fields.file, UploadedSound):
        if fields.file_url is not None:
            raise request_errors.invalid_value("file_url", "it is not allowed together with 'file'")
        return await speech.files.open(fields.file.file, tenant)
    if fields.file is not None:
        raise request_errors.invalid_type("file", "a part of a form (multipart/form-data)", fields.file)
    if fields.file_url is None:
        raise missing_parameter("file")
    return await speech.files.fetch(fields.file_url, tenant)
