"""`llmstack chat` and `llmstack complete` as they are typed."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from llmstack_command.client.run import api_key_from
from llmstack_command.main import main


def run(server: Any, *arguments: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "llmstack_command", *arguments, "--url", server.url]
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=60)


def test_quick_prints_the_answer_and_ends(server: Any):
    ran = run(server, "chat", "-q", "hello there", "--system-prompt", "be brief", "--temperature", "0", "--seed", "7")
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "hello there\n", "")
    assert server.requests[0][2] == {
        "model": "first-model", "temperature": 0.0, "seed": 7, "stream": True,
        "messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello there"}],
    }  # fmt: skip


def test_a_pipe_is_continued(server: Any):
    ran = run(
        server, "complete", "--max-tokens", "5", "--top_p", "0.5", "--model-name", "second-model", text="one\ntwo"
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "one\ntwo\n", "")
    body = {"model": "second-model", "max_tokens": 5, "top_p": 0.5, "stream": True, "prompt": "one\ntwo"}
    assert server.requests[0][2] == body


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model-name", "third"], ["--model-name", "'third'", "first-model, second-model"]),
        (["--url", "nowhere"], ["--url", "'nowhere'"]),
    ],
)
def test_a_mistake_is_one_line(server: Any, arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]):
    assert main(["chat", "-q", "x", "--url", server.url, *arguments]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("llmstack chat: error: ")
    assert captured.err.count("\n") == 1
    assert all(word in captured.err for word in words), captured.err


def test_a_refusal_is_one_line(server: Any, capsys: pytest.CaptureFixture[str]):
    server.refusal = (401, {"error": {"message": "You didn't provide an API key."}})
    assert main(["complete", "-q", "x", "--url", server.url]) == 1
    assert "didn't provide" in capsys.readouterr().err


def test_keys_come_from_the_environment_in_order():
    assert api_key_from({"OPENAI_API_KEY": "o", "LLMSTACK_API_KEY": "l"}) == "l"
    assert api_key_from({"OPENAI_API_KEY": "o", "LLMSTACK_API_KEY": ""}) == "o"
    assert api_key_from({}) is None


class Typist:
    """A person at a terminal."""

    def __init__(self, command: list[str], folder: Path) -> None:
        self.controller, self.terminal = pty.openpty()
        name = os.ttyname(self.terminal)
        env = {**os.environ, "HOME": str(folder), "TERM": "dumb", "INPUTRC": os.devnull}
        # A session whose first process opens the terminal owns it: Ctrl-C becomes a signal there.
        opening = ["sh", "-c", f'exec "$0" "$@" <{name} >{name} 2>&1']
        self.process = subprocess.Popen([*opening, *command], env=env, start_new_session=True)
        self.shown = ""

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.controller)
        os.close(self.terminal)

    def type(self, text: str) -> None:
        os.write(self.controller, text.encode())

    def wait_for(self, text: str) -> None:
        """Reads until `text` is on the screen, and forgets everything up to it."""
        deadline = time.monotonic() + 60
        while text not in self.shown and time.monotonic() < deadline:
            if select.select([self.controller], [], [], 0.1)[0]:
                self.shown += os.read(self.controller, 4096).decode()
        assert text in self.shown, self.shown
        self.shown = self.shown.partition(text)[2]


def test_a_person_talks_stops_an_answer_and_leaves(server: Any, tmp_path: Path):
    typist = Typist([sys.executable, "-m", "llmstack_command", "chat", "--url", server.url], tmp_path)
    try:
        typist.wait_for("> ")
        typist.type("good day\n")
        typist.wait_for("good day")  # the echo
        typist.wait_for("good day")  # the answer
        typist.wait_for("> ")
        server.gate.clear()
        server.answers["long story"] = "Once upon"
        typist.type("long story\n")
        typist.wait_for("Once")
        typist.type("\x03")
        typist.wait_for("> ")
        assert server.has_lost_reader.wait(60)
        server.gate.set()
        typist.type("bye\n")
        typist.wait_for("bye\r\n")
        typist.wait_for("bye")
        typist.wait_for("> ")
        typist.type("\x04")
        assert typist.process.wait(60) == 0
    finally:
        typist.close()
    said = [(m["role"], m["content"]) for m in server.requests[-1][2]["messages"]]
    assert said == [
        ("user", "good day"), ("assistant", "good day"), ("user", "long story"), ("assistant", "Once"), ("user", "bye"),
    ]  # fmt: skip
