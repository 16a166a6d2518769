"""Realtime sessions of a real server: a refused page, a message that is too long, the drain, real speech, a kill."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
import wave
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from client_environments import Install, output_of, with_pip
from model_folders import model_folder
from openai import OpenAI
from socket_session import SocketSession
from speech_model import save_speech_model, sound

from llmstack_llm.testing import byte_tokenizer

KENNEDY = "and so my fellow americans ask not what your country can do for you ask what you can do for your country"
FOLDER = Path(os.environ.get("LLMSTACK_SPEECH", "speech-models"))
VLLM = {"type": "session.update", "model": "m"}
COMMIT = {"type": "input_audio_buffer.commit"}


folder = model_folder(save_speech_model, lambda path: byte_tokenizer(()).save(str(path / "tokenizer.json")))


@pytest.fixture(scope="module")
def speech() -> Path:
    """Eleven seconds of Kennedy, where the trained models are."""
    path = FOLDER / "speech" / "jfk.wav"
    if not path.is_file() or not (FOLDER / "whisper-tiny.en" / "config.json").is_file():
        pytest.skip(f"needs {FOLDER}/whisper-tiny.en and {path}: set LLMSTACK_SPEECH")
    return path


@pytest.fixture(scope="module")
def trained_server(speech: Path, serve: Callable[..., Any]) -> Iterator[Any]:
    with serve(str(FOLDER / "whisper-tiny.en"), "--dtype", "float32", "--served-model-name", "m") as one:
        yield one


def pcm(seed: int) -> bytes:
    return bytes((sound(seed) * 32_767).astype("<i2").tobytes())


def frames(path: Path) -> tuple[int, bytes]:
    with wave.open(str(path)) as file:
        return file.getframerate(), file.readframes(file.getnframes())


def plain(text: str) -> str:
    return " ".join(re.sub(r"[^a-z ]", " ", text.lower()).split())


def openai_form(rate: int) -> dict[str, Any]:
    asked = {"format": {"type": "audio/pcm", "rate": rate}, "transcription": {"model": "m"}, "turn_detection": None}
    return {"type": "session.update", "session": {"type": "transcription", "audio": {"input": asked}}}


def transcribed(server: Any, path: Path) -> str:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client, path.open("rb") as file:
        return str(client.audio.transcriptions.create(file=file, model="m").text)


def test_a_server_opens_sessions_within_limits_and_ends_them_with_a_drain(
    folder: Path, launch: Callable[..., Any]
) -> None:
    server = launch(str(folder), "--dtype", "float32", "--served-model-name", "m", "--max-body-bytes", "100k")
    server.wait_until_ready()
    with SocketSession(server.url, {"origin": "https://evil.example"}) as refused:
        assert refused.status == 403
    with SocketSession(server.url, path="/v1/nothing") as unknown:
        assert unknown.status == 404
    with SocketSession(server.url) as session:
        assert (session.status, session.next()["type"]) == (101, "session.created")
        session.tell(VLLM)
        session.tell(COMMIT)
        session.add(pcm(0))
        session.tell({**COMMIT, "final": True})
        *deltas, done = session.until("done")
        assert {delta["type"] for delta in deltas} <= {"transcription.delta"}
        assert done["usage"]["completion_tokens"] > 0
        session.add(bytes(150_000))
        assert session.next()["code"] == "request_too_large"
        session.add(pcm(1))
        session.tell({"type": "nothing"})  # the answer to it comes once the sound before it was taken
        session.until("error")
        server.process.send_signal(signal.SIGTERM)
        *_, done, error = session.until("error")
        assert (done["type"], error["code"]) == ("transcription.done", "server_shutting_down")
        assert (session.next(), session.close_code) == ({}, 1001)
    assert server.process.wait(60) == 0
    with pytest.raises(OSError, match=r"refused|reset"):
        SocketSession(server.url)


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("rate", [16_000, 24_000, 48_000])
def test_a_session_has_the_text_of_a_file_with_the_same_sound(
    trained_server: Any, speech: Path, tmp_path: Path, rate: int
) -> None:
    own_rate, data = frames(speech)
    samples, path = np.frombuffer(data, "<i2"), tmp_path / "sound.wav"
    places = np.arange(len(samples) * rate // own_rate) * own_rate / rate
    data = np.interp(places, np.arange(len(samples)), samples).astype("<i2").tobytes()
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, rate, 0, "NONE", ""))
        file.writeframes(data)
    expected = transcribed(trained_server, path)
    assert plain(expected) == KENNEDY
    with SocketSession(trained_server.url) as session:
        session.tell(openai_form(rate))
        for start in range(0, len(data), 64_000):
            session.add(data[start : start + 64_000])
        session.tell(COMMIT)
        events = session.until("completed")
        assert events[-1]["transcript"] == expected
        assert plain("".join(event.get("delta", "") for event in events)) == plain(expected)
        assert not [event for event in events if event["type"] == "error"]


@pytest.mark.full
@pytest.mark.timeout(600)
def test_words_come_while_they_are_said_and_a_killed_engine_core_costs_a_pause(
    trained_server: Any, speech: Path
) -> None:
    rate, data = frames(speech)
    expected = transcribed(trained_server, speech)
    piece = rate // 5 * 2
    with SocketSession(trained_server.url) as session:
        session.tell(openai_form(rate))
        session.until("updated")
        sent, killed, said_at = [0], [0], list[int]()

        def speak() -> None:
            for start in range(0, len(data), piece):
                session.add(data[start : start + piece])
                sent[0] += piece
                time.sleep(0.2)
            session.tell(COMMIT)

        def seen(event: dict[str, Any]) -> None:
            if event["type"].endswith("delta"):
                said_at.append(sent[0])
                if not killed[0]:
                    killed[0] = trained_server.engine_pid()
                    os.kill(killed[0], signal.SIGKILL)

        speaking = threading.Thread(target=speak)
        speaking.start()
        events = session.until("completed", seen)
        speaking.join()
        assert events[-1]["transcript"] == expected
        assert killed[0]
        assert said_at[0] < len(data)  # before all of it was there
        session.add(data[:64_000])
        session.tell(COMMIT)
        assert plain(session.until("completed")[-1]["transcript"]).startswith("and so my fellow")
    assert trained_server.engine_pid() != killed[0]


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["silence", "noise", "faint noise", "hum"])
def test_nothing_is_said_of_noise_and_silence(trained_server: Any, kind: str) -> None:
    rate = 16_000
    noise = np.random.default_rng(1).standard_normal(8 * rate)
    hum = np.sin(np.arange(8 * rate) * (2 * np.pi * 50 / rate))
    samples = {"silence": 0 * hum, "noise": 0.05 * noise, "faint noise": 0.002 * noise, "hum": 0.1 * hum}[kind]
    data = (np.clip(samples, -1, 1) * 32_767).astype("<i2").tobytes()
    with SocketSession(trained_server.url) as session:
        session.tell(openai_form(rate))
        session.until("updated")
        for start in range(0, len(data), rate // 5):
            session.add(data[start : start + rate // 5])
            time.sleep(0.05)  # so that many drafts are made of it
        session.tell(COMMIT)
        events = session.until("completed")
    assert [event["delta"] for event in events if event["type"].endswith("delta")] == []
    assert events[-1]["transcript"] == ""


@pytest.mark.clients
@pytest.mark.timeout(1200)
def test_openai_for_python_runs_the_example_of_the_page(
    install: Install, trained_server: Any, speech: Path, tmp_path: Path
) -> None:
    environment = install(with_pip, "openai[realtime]", client="openai")
    page = (Path(__file__).resolve().parents[1] / "docs" / "speech.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    (example,) = [block for block in blocks if "realtime.connect" in block]
    (tmp_path / "example.py").write_text(example.replace("http://localhost:8000", trained_server.url))
    (tmp_path / "jfk.wav").write_bytes(speech.read_bytes())
    assert plain(output_of([environment / "bin/python", "example.py"], tmp_path)) == KENNEDY
