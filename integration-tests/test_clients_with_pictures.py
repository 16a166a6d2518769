"""Other people's clients send a picture, each in its own form, and get the answer that plain HTTP gets."""

from __future__ import annotations

import base64
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import picture_model
import pytest
from client_environments import CLIENTS, Install, said_by, with_npm, with_pip

pytestmark = [pytest.mark.clients, pytest.mark.timeout(1200)]
PICTURE = picture_model.data_url(picture_model.picture(1))
MODEL = "m"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, serve: Callable[..., Any]) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("pictures") / "model"
    picture_model.save_picture_model(folder)
    with serve(str(folder), "--dtype", "float32", "--served-model-name", MODEL) as one:
        yield one


def answer(server: Any, num_tokens: int) -> str:
    messages = [{"role": "user", "content": picture_model.parts((1,))}]
    body = {"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": num_tokens}
    status, found, _ = server.post("/v1/chat/completions", body)
    assert status == 200
    return str(found["choices"][0]["message"]["content"])


def test_openai_for_python(server: Any) -> None:
    client = server.client
    messages: Any = [{"role": "user", "content": picture_model.parts((1,))}]
    found = client.chat.completions.create(model=MODEL, messages=messages, temperature=0, max_tokens=12)
    assert found.choices[0].message.content == answer(server, 12)
    asked = [
        {"type": "input_image", "image_url": PICTURE, "detail": "auto"},
        {"type": "input_text", "text": picture_model.QUESTION},
    ]
    responses = client.responses.create(
        model=MODEL, input=[{"role": "user", "content": asked}], temperature=0, max_output_tokens=16
    )
    assert responses.output_text == answer(server, 16)


def test_anthropic_for_python(server: Any) -> None:
    anthropic = pytest.importorskip("anthropic")
    media_type, data = PICTURE.removeprefix("data:").split(";base64,")
    source = {"type": "base64", "media_type": media_type, "data": data}
    content = [{"type": "image", "source": source}, {"type": "text", "text": picture_model.QUESTION}]
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        found = client.messages.create(
            model=MODEL, max_tokens=12, messages=[{"role": "user", "content": content}], extra_body={"temperature": 0}
        )
    assert found.content[0].text == answer(server, 12)


def test_langchain_in_both_of_its_forms(install: Install, server: Any, tmp_path: Path) -> None:
    python = install(with_pip, "langchain-openai>=1,<2", "litellm>=1.80,<2") / "bin/python"
    command = [python, CLIENTS / "langchain_picture.py", server.url + "/v1", MODEL, PICTURE, picture_model.QUESTION]
    assert said_by(command, tmp_path) == [answer(server, 12)] * 2


def test_vercel_ai_by_chats_and_by_responses(install: Install, server: Any, tmp_path: Path) -> None:
    folder = install(with_npm, "ai@^6", "@ai-sdk/openai-compatible@^2", "@ai-sdk/openai@^3", "zod@^4")
    script = shutil.copy(CLIENTS / "vercel_picture.mjs", folder)  # modules are looked for beside the script
    file = tmp_path / "picture.png"
    file.write_bytes(base64.b64decode(PICTURE.partition(",")[2]))
    command: list[object] = ["node", script, server.url + "/v1", MODEL, file, picture_model.QUESTION]
    assert said_by(command, tmp_path) == [answer(server, 16)] * 2
