"""Commands inside a conversation, and what they change."""

from __future__ import annotations

import io
import json
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from llmstack_command.client.chat_commands import ChatCommands, Conversation
from llmstack_command.client.session import ChatSession
from llmstack_command.client.terminal import Terminal
from llmstack_command.errors import ApiError


class Person(io.StringIO):
    """Standard input of a terminal."""

    def isatty(self) -> bool:
        return True


class FakeClient:
    """Answers `ok`, with the usage of a server."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []

    def model_names(self) -> list[str]:
        return ["m", "other"]

    def stream(self, route: str, body: dict[str, Any]) -> Generator[dict[str, Any], None, None]:
        self.bodies.append({**body, "messages": list(body["messages"])})
        yield {"choices": [{"delta": {"content": "o"}}]}
        yield {"choices": [{"delta": {"content": "k"}}]}
        yield {"choices": [], "usage": {"completion_tokens": 2}}


def make() -> tuple[ChatSession, FakeClient, io.StringIO]:
    client, out = FakeClient(), io.StringIO()
    return ChatSession(client, Terminal(Person(), out), {"model": "m"}, None), client, out


def test_settings_and_instructions_change_the_next_request() -> None:
    session, client, out = make()
    for line in ("/system be brief", "/set temperature 0", "/set max_tokens 5", "/model other", "hello"):
        session.ask(line)
    (body,) = client.bodies
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("other", 0.0, 5)
    assert body["messages"] == [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    session.ask("/set temperature")
    session.ask("/system -")
    session.ask("/clear")
    session.ask("again")
    assert "temperature" not in client.bodies[1]
    assert client.bodies[1]["messages"] == [{"role": "user", "content": "again"}]
    assert "2 tokens, " in out.getvalue()
    assert "per second" in out.getvalue()


def test_commands_show_what_is_set() -> None:
    conversation = Conversation({"model": "m", "seed": 1}, "be brief")
    commands = ChatCommands(conversation, lambda: ["m", "other"])
    assert commands.run("/system") == "be brief"
    assert commands.run("/set") == "seed 1"
    assert commands.run("/model") == "* m\n  other"
    assert "/save FILE" in commands.run("/help")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/nothing", "there is no command /nothing"),
        ("/set height 3", "there is no setting height"),
        ("/set temperature hot", "hot is no value for temperature"),
        ("/set temperature nan", "nan is no value for temperature"),
        ("/set seed 1.5", "1.5 is no value for seed"),
        ("/model third", "the server has no third; it has m, other"),
        ("/save", "name a file"),
        ("/save /nowhere/at/all.json", "No such file"),
    ],
)
def test_a_command_that_cannot_be_done_says_why(line: str, message: str) -> None:
    session, client, _ = make()
    with pytest.raises(ApiError) as caught:
        session.ask(line)
    assert message in str(caught.value)
    assert client.bodies == []


def test_a_conversation_is_saved_once_for_its_owner_alone(tmp_path: Path) -> None:
    session, _, _ = make()
    session.ask("hello")
    path = tmp_path / "talk.json"
    session.ask(f"/save {path}")
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "ok"}]
    assert json.loads(path.read_text(encoding="utf-8")) == messages
    assert path.stat().st_mode & 0o777 == 0o600
    session.ask(f"/save {tmp_path / 'talk.md'}")
    assert (tmp_path / "talk.md").read_text(encoding="utf-8") == "## user\n\nhello\n\n## assistant\n\nok\n"
    with pytest.raises(ApiError, match="is there already"):
        session.ask(f"/save {path}")


def test_two_slashes_begin_a_message_with_one() -> None:
    session, client, _ = make()
    session.ask("//etc is a folder")
    assert client.bodies[0]["messages"][0]["content"] == "/etc is a folder"


def test_a_pipe_has_no_commands() -> None:
    client = FakeClient()
    ChatSession(client, Terminal(io.StringIO(), io.StringIO()), {"model": "m"}, None).ask("/help")
    assert client.bodies[0]["messages"][0]["content"] == "/help"
    assert "stream_options" not in client.bodies[0]
