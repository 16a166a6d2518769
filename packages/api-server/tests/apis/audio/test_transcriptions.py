"""Transcriptions and translations: every format and field, forms and JSON, refusals by name."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from server_helpers.speech import ENGLISH, AlignedEngine, SpeechEngine, wav

from llmstack_llm.admission.sampling import GivenSampling
from llmstack_server.app import build_app
from llmstack_server.options.config import HTTPConfig
from llmstack_server.testing import Answer, FakeEngineClient, call, ready_state

TEXTS = (" And so,", " my fellow Americans")
TEXT = "And so, my fellow Americans"
VERBOSE = {"response_format": "verbose_json"}
BOUNDARY = {"content-type": "multipart/form-data; boundary=edge"}


@pytest.fixture
async def engine() -> AsyncIterator[SpeechEngine]:
    engine = SpeechEngine(*TEXTS)
    yield engine
    await engine.speech.shutdown()


def part(name: str, content: bytes | str, filename: str | None = None) -> bytes:
    data = content if isinstance(content, bytes) else content.encode()
    end = "" if filename is None else f'; filename="{filename}"'
    return f'--edge\r\nContent-Disposition: form-data; name="{name}"{end}\r\n\r\n'.encode() + data + b"\r\n"


def form(fields: list[tuple[str, str]], content: bytes | None) -> bytes:
    file = b"" if content is None else part("file", content, "a.wav")
    return file + b"".join(part(*field) for field in fields) + b"--edge--\r\n"


async def ask(
    engine: FakeEngineClient, *fields: tuple[str, str], content: bytes | None = None, path: str = "transcriptions",
    http: HTTPConfig | None = None,
) -> Answer:  # fmt: skip
    app = build_app(ready_state(engine, http))
    body = form([("model", "fake"), *fields], wav() if content is None else content)
    return await call(app, "POST", f"/v1/audio/{path}", body, BOUNDARY)


async def refused(engine: FakeEngineClient, *fields: tuple[str, str], **options: Any) -> tuple[str, str]:
    answer = await ask(engine, *fields, **options)
    assert answer.status == 400, answer.body
    error = answer.json()["error"]
    return error["code"], error["param"]


async def test_a_file_becomes_its_text(engine: SpeechEngine) -> None:
    answer = await ask(engine, ("language", "en"))
    assert answer.json() == {"text": TEXT, "usage": {"type": "duration", "seconds": 1}}
    (request,) = engine.requests
    prompt: Any = request.prompt
    assert prompt.token_ids == [301, 303, 305]
    assert engine.files.decoded_s == 1.0


LINES = "00:00:00.000 --> 00:00:00.500\nAnd so,\n\n", "00:00:00.500 --> 00:00:01.000\nmy fellow Americans\n\n"
SRT = "".join(f"{number}\n{line.replace('.', ',')}" for number, line in enumerate(LINES, 1))


@pytest.mark.parametrize(
    ("response_format", "text"), [("text", f"{TEXT}\n"), ("srt", SRT), ("vtt", "WEBVTT\n\n" + "".join(LINES))]
)
async def test_texts_and_subtitles_are_plain(engine: SpeechEngine, response_format: str, text: str) -> None:
    answer = await ask(engine, ("response_format", response_format))
    assert answer.headers["content-type"] == "text/plain; charset=utf-8"
    assert answer.body.decode() == text


async def test_verbose_json_has_segments_and_the_detected_language(engine: SpeechEngine) -> None:
    answer = (await ask(engine, ("response_format", "verbose_json"), ("timestamp_granularities[]", "segment"))).json()
    segments = answer.pop("segments")
    assert answer == {
        "task": "transcribe", "language": "de", "duration": 1.0, "text": TEXT,
        "usage": {"type": "duration", "seconds": 1},
    }  # fmt: skip
    assert [(one["id"], one["start"], one["end"], one["text"]) for one in segments] == [
        (0, 0.0, 0.5, TEXTS[0]), (1, 0.5, 1.0, TEXTS[1])
    ]  # fmt: skip
    assert segments[0] | {"tokens": [], "compression_ratio": 1} == {
        "id": 0, "seek": 0, "start": 0.0, "end": 0.5, "text": " And so,", "tokens": [], "temperature": 0.0,
        "avg_logprob": -0.25, "compression_ratio": 1, "no_speech_prob": pytest.approx(0.05),
    }  # fmt: skip


async def test_words_have_times_of_their_own() -> None:
    engine = AlignedEngine(*TEXTS)
    fields = [("response_format", "verbose_json"), ("language", "en")]
    words = [("timestamp_granularities[]", "word")]
    answer = (await ask(engine, *fields, *words)).json()
    assert "segments" not in answer
    assert answer["words"] == [
        {"word": "And", "start": 0.01, "end": 0.05}, {"word": "so,", "start": 0.05, "end": 0.08},
        {"word": "my", "start": 0.11, "end": 0.14}, {"word": "fellow", "start": 0.14, "end": 0.21},
        {"word": "Americans", "start": 0.21, "end": 0.31},
    ]  # fmt: skip
    both = (await ask(engine, *fields, *words, ("timestamp_granularities[]", "segment"))).json()
    assert (len(both["segments"]), both["words"]) == (2, answer["words"])
    await engine.speech.shutdown()


async def test_a_stream_has_deltas_and_ends_with_text_and_usage(engine: SpeechEngine) -> None:
    answer = await ask(engine, ("stream", "true"), ("language", "en"), ("include[]", "logprobs"))
    *deltas, done, end = answer.events()
    assert end == "[DONE]"
    assert [one["type"] for one in deltas] == ["transcript.text.delta"] * 2
    assert "".join(one["delta"] for one in deltas) == done["text"] == TEXT
    assert len(done["logprobs"]) == len("".join(TEXTS))
    assert deltas[0]["logprobs"][1] == {"token": "A", "logprob": -0.25, "bytes": [65]}
    usage = done["usage"]
    assert usage["input_token_details"] == {"audio_tokens": 50, "text_tokens": 3}
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"] == 53 + len("".join(TEXTS)) + 5


async def test_fields_reach_the_engine(engine: SpeechEngine) -> None:
    fields = {
        "language": "EN", "prompt": "Kennedy", "temperature": "0.5", "seed": "7", "top_p": "0.9", "top_k": "5",
        "max_completion_tokens": "40", "priority": "3", "chunking_strategy": "auto", "user": "me",
    }  # fmt: skip
    assert (await ask(engine, *fields.items())).status == 200
    (request,) = engine.requests
    values = request.sampling.values
    assert (values["temperature"], values["seed"], values["top_p"], values["top_k"]) == (0.5, 7, 0.9, 5)
    assert (values["max_tokens"], request.priority) == (40, 3)
    prompt: Any = request.prompt
    assert prompt.token_ids == [302, *b" Kennedy", 301, 303, 305]


async def test_translations_are_in_english(engine: SpeechEngine) -> None:
    answer = await ask(engine, ("response_format", "verbose_json"), path="translations")
    assert answer.json()["task"] == "translate"
    prompt: Any = engine.requests[-1].prompt
    assert prompt.token_ids == [301, 304, 306]
    english = SpeechEngine(*TEXTS, tokens=ENGLISH)
    assert await refused(english, path="translations") == ("unsupported_value", "language")
    assert english.requests == []
    await english.speech.shutdown()


async def test_a_json_body_names_the_file(engine: SpeechEngine) -> None:
    app = build_app(ready_state(engine))
    url = "data:audio/wav;base64," + base64.b64encode(wav()).decode()
    body = {"model": "fake", "file_url": url, "language": "en", "temperature": 0}
    answer = await call(app, "POST", "/v1/audio/transcriptions", body)
    assert answer.json()["text"] == TEXT
    for wrong, param in (({"file_url": "http://127.0.0.1/a.wav"}, "file_url"), ({"file": "a.wav"}, "file")):
        answer = await call(app, "POST", "/v1/audio/transcriptions", {"model": "fake", **wrong})
        assert (answer.status, answer.json()["error"]["param"]) == (400, param)


async def test_beams_are_those_of_the_first_try(engine: SpeechEngine) -> None:
    answer = await ask(engine, ("language", "en"), ("use_beam_search", "true"), ("n", "4"), ("length_penalty", "0.5"))
    assert answer.json()["text"] == TEXT
    (request,) = engine.requests
    assert isinstance(request.sampling, GivenSampling)
    names = ("use_beam_search", "n", "length_penalty", "temperature")
    assert [request.sampling.values.get(name) for name in names] == [True, 4, 0.5, 0.0]


async def test_silence_has_no_text_and_costs_no_request(engine: SpeechEngine) -> None:
    answer = await ask(engine, ("language", "en"), content=wav(amplitude=0.0))
    assert answer.json() == {"text": "", "usage": {"type": "duration", "seconds": 1}}
    assert engine.requests == []


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"response_format": "diarized_json"}, "unsupported_parameter", "response_format"),
        ({"response_format": "pdf"}, "invalid_value", "response_format"),
        ({"response_format": "srt", "stream": "true"}, "invalid_value", "response_format"),
        ({"timestamp_granularities[]": "segment"}, "invalid_value", "timestamp_granularities"),
        ({"timestamp_granularities[]": "phone"}, "invalid_value", "timestamp_granularities[0]"),
        ({**VERBOSE, "timestamp_granularities[]": "word"}, "unsupported_parameter", "timestamp_granularities"),
        ({"include[]": "logprobs", "response_format": "srt"}, "invalid_value", "include"),
        ({"include[]": "all"}, "invalid_value", "include[0]"),
        ({"language": "xx"}, "unsupported_value", "language"),
        ({"temperature": "warm"}, "invalid_type", "temperature"),
        ({"temperature": "9"}, "decimal_above_max_value", "temperature"),
        ({"seed": "1.5"}, "invalid_type", "seed"),
        ({"stream": "perhaps"}, "invalid_type", "stream"),
        ({"chunking_strategy": '{"type": "server_vad"}'}, "unsupported_parameter", "chunking_strategy"),
        ({"to_language": "de"}, "unsupported_parameter", "to_language"),
        ({"known_speaker_names[]": "Ann"}, "unsupported_parameter", "known_speaker_names"),
        ({"model": "other"}, "invalid_value", "model"),
        ({"prompt": "a" * 9000}, "string_above_max_length", "prompt"),
        ({"n": "4"}, "invalid_value", "n"),
        ({"length_penalty": "2"}, "invalid_value", "length_penalty"),
        ({"use_beam_search": "perhaps"}, "invalid_type", "use_beam_search"),
        ({"use_beam_search": "true", "n": "0"}, "integer_below_min_value", "n"),
        ({"use_beam_search": "true", "n": "4", "top_p": "0.5"}, "invalid_value", "top_p"),
        ({"use_beam_search": "true", "n": "4", "temperature": "0.5"}, "invalid_value", "temperature"),
    ],
)  # fmt: skip
async def test_fields_are_refused_by_name(engine: SpeechEngine, fields: dict[str, str], code: str, param: str) -> None:
    assert await refused(engine, *fields.items()) == (code, param)
    assert engine.requests == []
    assert engine.files.decoded_s == 0


async def test_files_are_refused_by_name(engine: SpeechEngine) -> None:
    assert await refused(engine, content=b"<html>") == ("unsupported_media_format", "file")
    assert await refused(engine, content=b"RIFF\0\0\0\0WAVE") == ("invalid_audio", "file")
    assert await refused(engine, content=wav(0.05)) == ("audio_too_short", "file")
    assert await refused(engine, content=wav(61.0)) == ("audio_too_long", "file")
    assert await refused(engine, content=b"") == ("unsupported_media_format", "file")
    large = await ask(engine, content=bytes(1 << 20) + b"more", http=HTTPConfig(max_upload_mb=1))
    assert large.status == 413
    assert engine.requests == []


async def test_forms_without_a_part_are_refused_by_its_name(engine: SpeechEngine) -> None:
    app = build_app(ready_state(engine))
    cases = {
        "model": form([], wav()),
        "file": form([("model", "fake")], None),
        "language": form([("model", "fake"), ("language", "en"), ("language", "de")], wav()),
    }
    for param, body in cases.items():
        answer = await call(app, "POST", "/v1/audio/transcriptions", body, BOUNDARY)
        assert (answer.status, answer.json()["error"]["param"]) == (400, param)
    two = part("file", wav(), "a.wav") + form([("model", "fake")], wav())
    answer = await call(app, "POST", "/v1/audio/transcriptions", two, BOUNDARY)
    assert (answer.status, answer.json()["error"]["param"]) == (400, "file")
    cut = form([("model", "fake")], wav())[:500]
    assert (await call(app, "POST", "/v1/audio/transcriptions", cut, BOUNDARY)).status == 400


async def test_metrics_count_seconds_of_sound_and_refused_files(engine: SpeechEngine) -> None:
    app = build_app(ready_state(engine))
    for content in (wav(2.0), wav(0.05)):
        await call(app, "POST", "/v1/audio/transcriptions", form([("model", "fake")], content), BOUNDARY)
    lines = (await call(app, "GET", "/metrics")).body.decode().splitlines()
    found = dict(line.rsplit(" ", 1) for line in lines if line.startswith("llmstack:audio_"))
    counted = {name.partition("{")[0].removeprefix("llmstack:audio_"): float(value) for name, value in found.items()}
    assert counted["seconds_total"] == counted["decoded_seconds_total"] == 2.0
    assert counted["repeated_seconds_total"] == 1.0  # the model says what is in the first second alone
    assert 'llmstack:audio_failures_total{code="audio_too_short",model_name="fake"}' in found
    assert counted["transcription_seconds_total"] > 0


async def test_a_model_of_text_refuses_before_it_reads_the_file() -> None:
    assert await refused(FakeEngineClient()) == ("unsupported_value", "model")


async def test_a_client_that_leaves_ends_its_windows_and_frees_its_file(
    engine: SpeechEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, closed = asyncio.Event(), []

    class Endless:
        async def __aenter__(self) -> Endless:
            return self

        async def __aexit__(self, *error: object) -> None:
            closed.append(True)

        async def __aiter__(self) -> AsyncIterator[Any]:
            begun.set()
            yield await asyncio.Event().wait()

    async def submit(*requests: object) -> Endless:
        return Endless()

    monkeypatch.setattr(engine, "submit", submit)
    for fields in ([("language", "en")], [("language", "en"), ("stream", "true")]):
        begun.clear()
        asking = asyncio.create_task(ask(engine, *fields))
        await begun.wait()
        assert engine.files._shares.held
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        assert closed.pop()
        assert engine.files._shares.held == 0


async def test_an_error_of_a_window_ends_the_request_and_frees_its_file(
    engine: SpeechEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*requests: object) -> None:
        raise RuntimeError("odd")

    monkeypatch.setattr(engine, "submit", fail)
    assert (await ask(engine, ("language", "en"))).status == 500
    streamed = await ask(engine, ("language", "en"), ("stream", "true"))
    assert streamed.status == 500 or json.loads(streamed.body)
    assert engine.files._shares.held == 0
