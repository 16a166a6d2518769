"""Odd sound files through the HTTP door: what a header says wrongly, what is no sound, and what is too long."""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
from media_helpers.sounds import chunk, encoded, pcm16, tone, wav
from server_helpers.speech import SpeechEngine

from llmstack_server.app import build_app
from llmstack_server.testing import call, ready_state

BOUNDARY = {"content-type": "multipart/form-data; boundary=edge"}
TONE = tone(1.0)
PCM = pcm16(TONE)
STEREO = np.stack([tone(1.0, 44_100), -tone(1.0, 44_100)], axis=1)
SAYS = {
    "streamed, with no length": wav(PCM, size=0xFFFFFFFF),
    "a length of 0": wav(PCM, size=0),
    "LIST before the samples": wav(PCM, before=chunk(b"LIST", b"INFOISFT\5\0\0\0odd!\0")),
    "µ-law": wav(bytes(range(256)) * 63, code=7, width=8)[:-128],
    "floats": wav(TONE.tobytes(), code=3, width=32),
    "extensible": wav(PCM, code=0xFFFE, extra=struct.pack("<HHIH", 22, 16, 4, 1) + bytes(14)),
    "stereo that cancels out": wav(pcm16(STEREO), channels=2, rate=44_100),
    "cut": wav(PCM)[:16_044],
}
NO_SOUND = {
    "SDP": b"v=0\r\no=- 0 0 IN IP4 127.0.0.1\r\nm=audio 5004 RTP/AVP 0\r\n",
    "HLS": b"#EXTM3U\n#EXTINF:5,\nhttp://127.0.0.1:9/a.ts\n",
    "DASH": b'<?xml version="1.0"?><MPD><BaseURL>http://127.0.0.1:9/</BaseURL></MPD>',
    "ffconcat": b"ffconcat version 1.0\nfile /etc/passwd\n",
    "a page": b"<!DOCTYPE html><title>404</title>",
    "a picture": b"\x89PNG\r\n\x1a\n" + bytes(40),
    "nothing": b"",
}


@pytest.fixture
async def engine() -> AsyncIterator[SpeechEngine]:
    engine = SpeechEngine(" yes", max_s=60.0)
    yield engine
    await engine.speech.shutdown()


async def ask(engine: SpeechEngine, content: bytes) -> Any:
    head = '--edge\r\nContent-Disposition: form-data; name="{}"{}\r\n\r\n'
    body = head.format("model", "").encode() + b"fake\r\n" + head.format("language", "").encode() + b"en\r\n"
    body += head.format("file", '; filename="a.mp3"').encode() + content + b"\r\n--edge--\r\n"  # the name is wrong
    return await call(build_app(ready_state(engine)), "POST", "/v1/audio/transcriptions", body, BOUNDARY)


async def test_odd_headers_have_their_sound(engine: SpeechEngine) -> None:
    for name, content in SAYS.items():
        answer = await ask(engine, content)
        assert answer.status == 200, name
        found = answer.json()
        assert (found["text"], found["usage"]["seconds"]) == ("yes", 1), name


async def test_what_is_no_sound_is_refused_before_a_window_is_queued(engine: SpeechEngine) -> None:
    for name, content in NO_SOUND.items():
        answer = await ask(engine, content)
        assert answer.status == 400, name
        error = answer.json()["error"]
        assert (error["code"], error["param"]) == ("unsupported_media_format", "file"), name
        assert "127.0.0.1" not in error["message"]
    short = await ask(engine, wav(pcm16(tone(1.0, 44_100)), rate=44_100)[:1001])
    assert short.json()["error"]["code"] == "audio_too_short"
    assert engine.requests == []


async def test_minutes_of_silence_in_a_small_file_are_refused_by_their_length(engine: SpeechEngine) -> None:
    silence = encoded("ogg", np.zeros(48_000 * 300, np.float32), "libopus")
    assert len(silence) < 200_000
    answer = await ask(engine, silence)
    assert (answer.status, answer.json()["error"]["code"]) == (400, "audio_too_long")
    whole = encoded("mp4", tone(2.0, 48_000), "aac")
    cut = await ask(engine, whole[: len(whole) // 2])  # its index was at the end
    assert (cut.status, cut.json()["error"]["code"]) == (400, "invalid_audio")
    assert engine.requests == []
    assert (await ask(engine, whole)).json()["text"] == "yes"
