"""Other people's clients transcribe a file or chat about a sound, and get what plain HTTP and OpenAI's client get."""

from __future__ import annotations

import json
import shutil
import wave
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sound_model
from client_environments import CLIENTS, Install, output_of, said_by, with_new_python, with_npm, with_pip
from openai import OpenAI
from speech_model import save_speech_model, sound

from llmstack_llm.testing import byte_tokenizer

pytestmark = [pytest.mark.clients, pytest.mark.timeout(1200)]
MODEL = "m"


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two windows of sound, and a pause between them."""
    path = tmp_path_factory.mktemp("sound") / "sound.wav"
    samples = np.concatenate([sound(1), np.zeros(16_000, np.float32), sound(2)])
    with wave.open(str(path), "wb") as written:
        written.setparams((1, 2, 16_000, 0, "NONE", ""))
        written.writeframes((np.clip(samples, -1, 1) * 32_767).astype("<i2").tobytes())
    return path


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, serve: Callable[..., Any]) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("speech") / "model"
    save_speech_model(folder)
    byte_tokenizer(()).save(str(folder / "tokenizer.json"))
    with serve(str(folder), "--dtype", "float32", "--served-model-name", MODEL) as one:
        yield one


@pytest.fixture(scope="module")
def text(server: Any, file: Path) -> str:
    options: dict[str, Any] = {"language": "en", "temperature": 0}
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client, file.open("rb") as opened:
        found: str = client.audio.transcriptions.create(file=opened, model=MODEL, **options).text
    assert found
    return found


def place(server: Any, file: Path) -> list[object]:
    """URL, model and file, as the scripts take them."""
    return [f"{server.url}/v1", MODEL, file]


def test_openai_for_node_transcribes(install: Install, server: Any, file: Path, text: str, tmp_path: Path) -> None:
    script = shutil.copy(CLIENTS / "openai_speech.mjs", install(with_npm, "openai@^7"))
    said = said_by(["node", script, *place(server, file)], tmp_path)
    assert said["text"] == said["pieces"] == said["done"] == text
    assert said["segments"].strip() == text.strip()
    assert said["numSubtitles"] == said["numSegments"] > 0
    assert said["duration"] == pytest.approx(5.0)
    assert said["tokens"] > 0
    assert said["english"]
    assert said["mistake"] == {"status": 400, "param": "response_format", "code": "unsupported_parameter"}


def test_vercel_ai_transcribes(install: Install, server: Any, file: Path, text: str, tmp_path: Path) -> None:
    folder = install(with_npm, "ai@^6", "@ai-sdk/openai@^3", "zod@^4")
    said = said_by(["node", shutil.copy(CLIENTS / "vercel_speech.mjs", folder), *place(server, file)], tmp_path)
    assert said["text"] == text
    assert said["numSegments"] > 0


def test_the_bridge_of_home_assistant_transcribes(
    install: Install, server: Any, file: Path, text: str, tmp_path: Path
) -> None:
    python = install(with_new_python, "wyoming-openai>=0.8,<0.9") / "bin/python"
    said = said_by([python, CLIENTS / "wyoming_speech.py", *place(server, file)], tmp_path)
    assert said == {"text": text, "models": [MODEL]}


def test_the_command_of_speaches_lists_the_model(install: Install, server: Any, tmp_path: Path) -> None:
    command = install(with_new_python, "speaches-cli==0.1.0") / "bin/speaches-cli"
    environment = f"SPEACHES_BASE_URL={server.url}"
    listed = json.loads(output_of(["env", environment, command, "model", "ls"], tmp_path))
    assert [one["id"] for one in listed["data"]] == [MODEL]


def test_langchain_chats_about_a_sound(
    install: Install, serve: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    python = install(with_pip, "langchain-openai>=1,<2") / "bin/python"
    folder = tmp_path_factory.mktemp("sounds") / "model"
    sound_model.save_sound_model(folder)
    data, question = sound_model.base64_of(sound_model.wav(sound_model.sound(2))), sound_model.QUESTION
    with serve(str(folder), "--dtype", "float32", "--served-model-name", MODEL) as one:
        content = [sound_model.input_audio(sound_model.wav(sound_model.sound(2))), {"type": "text", "text": question}]
        answer = one.client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": content}], temperature=0, max_tokens=12
        )
        place = [f"{one.url}/v1", MODEL, data, question]
        said = said_by([python, CLIENTS / "langchain_sound.py", *place], tmp_path)
    assert said == [answer.choices[0].message.content] * 3
