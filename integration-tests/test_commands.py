"""`llmstack chat` and `llmstack complete` against a real server, and what they say when there is none."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from typing import Any

import pytest

MODEL = "llmstack-demo"


def llmstack(*arguments: object, text: str | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "llmstack_command", *map(str, arguments)]
    environment = {**os.environ, **variables}
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=60, env=environment)


def test_chat_says_what_the_server_says(demo_server: Any) -> None:
    messages: Any = [{"role": "system", "content": "Tell stories."}, {"role": "user", "content": "A fox."}]
    answer = demo_server.client.chat.completions.create(model=MODEL, messages=messages, max_tokens=20, temperature=0)
    flags = ["--url", demo_server.url, "--system-prompt", "Tell stories.", "--max-tokens", 20, "--temperature", 0]
    for ran in (llmstack("chat", "-q", "A fox.", *flags), llmstack("chat", *flags, text="A fox.")):
        assert (ran.returncode, ran.stderr) == (0, "")
        assert ran.stdout == answer.choices[0].message.content + "\n"


def test_complete_continues_as_the_server_does(demo_server: Any) -> None:
    answer = demo_server.client.completions.create(model=MODEL, prompt="Once upon a time", max_tokens=20, seed=5)
    flags = ["--url", f"{demo_server.url}/v1", "--model-name", MODEL, "--max-tokens", 20, "--seed", 5]
    for ran in (
        llmstack("complete", "-q", "Once upon a time", *flags),
        llmstack("complete", *flags, text="Once upon a time"),
    ):
        assert (ran.returncode, ran.stderr) == (0, "")
        assert ran.stdout == answer.choices[0].text + "\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model-name", "gpt-9"], ["'gpt-9'", MODEL]),
        (["--max-tokens", "-5"], ["max_tokens"]),
        (["--temperature", "9"], ["temperature"]),
    ],
)
def test_a_refusal_is_the_servers_in_one_line(demo_server: Any, arguments: list[str], words: list[str]) -> None:
    ran = llmstack("chat", "-q", "Hi", "--url", demo_server.url, *arguments)
    assert (ran.returncode, ran.stdout) == (1, "")
    assert ran.stderr.count("\n") == 1
    assert all(word in ran.stderr for word in words), ran.stderr


def test_without_a_server_it_says_how_to_start_one() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    ran = llmstack("chat", "-q", "Hi", "--url", f"http://127.0.0.1:{port}")
    assert (ran.returncode, ran.stdout) == (1, "")
    assert "llmstack serve" in ran.stderr
    assert ran.stderr.count("\n") == 1


def test_a_key_comes_from_the_environment(serve: Any) -> None:
    with serve(env={"LLMSTACK_API_KEY": "correct horse"}) as server:
        let_in = llmstack(
            "complete", "-q", "Once", "--max-tokens", 2, "--url", server.url, LLMSTACK_API_KEY="correct horse"
        )
        assert (let_in.returncode, let_in.stderr) == (0, "")
        for key in ("", "wrong"):
            ran = llmstack("complete", "-q", "Once", "--url", server.url, LLMSTACK_API_KEY=key, OPENAI_API_KEY="")
            assert ran.returncode == 1
            assert "--api-key" in ran.stderr
            assert "horse" not in ran.stderr
