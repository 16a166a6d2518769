"""Conversations and completions over a server that is a function."""

from __future__ import annotations

import io
from collections.abc import Generator
from typing import Any

import pytest

from llmstack_command.client.session import ChatSession, CompletionSession, converse
from llmstack_command.client.terminal import Terminal
from llmstack_command.errors import ApiError


class FakeClient:
    """Says `answer 1`, `answer 2`, ...; raises what `failure` holds after the first piece."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.failure: BaseException | None = None
        self.num_closed = 0

    def model_names(self) -> list[str]:
        return ["m", "other"]

    def stream(self, route: str, body: dict[str, Any]) -> Generator[dict[str, Any], None, None]:
        self.bodies.append({**body, "messages": list(body["messages"])} if "messages" in body else body)
        try:
            yield {"choices": [{"delta": {"role": "assistant", "content": ""}}]}
            yield {"choices": [{"delta": {"reasoning_content": "hm"}}]}
            yield {"choices": [{"delta": {"content": "answer "}}]}
            if self.failure is not None:
                raise self.failure
            yield {"choices": [{"delta": {"content": str(len(self.bodies))}, "finish_reason": "stop"}]}
            yield {"choices": [], "usage": {}}
        finally:
            self.num_closed += 1


class Person(io.StringIO):
    """Standard input of a terminal."""

    def isatty(self) -> bool:
        return True


def test_a_conversation_is_remembered():
    client, out = FakeClient(), io.StringIO()
    session = ChatSession(client, Terminal(io.StringIO(), out), {"model": "m", "seed": 1}, "be brief")
    session.ask("one")
    session.ask("two")
    assert out.getvalue() == "answer 1\nanswer 2\n"
    assert client.bodies[1] == {
        "model": "m",
        "seed": 1,
        "messages": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "one"},
            {"role": "assistant", "content": "answer 1"},
            {"role": "user", "content": "two"},
        ],
    }


def test_a_failed_question_is_forgotten():
    client = FakeClient()
    session = ChatSession(client, Terminal(io.StringIO(), io.StringIO()), {}, None)
    client.failure = ApiError("no")
    with pytest.raises(ApiError):
        session.ask("one")
    assert session.messages == []


def test_ctrl_c_ends_an_answer_and_keeps_what_was_said():
    client, out = FakeClient(), io.StringIO()
    client.failure = KeyboardInterrupt()
    session = ChatSession(client, Terminal(Person(), out), {}, None)
    session.ask("one")
    assert out.getvalue() == "answer \n"
    assert session.messages[-1] == {"role": "assistant", "content": "answer "}
    assert client.num_closed == 1


def test_ctrl_c_ends_a_pipe():
    client = FakeClient()
    client.failure = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        ChatSession(client, Terminal(io.StringIO(), io.StringIO()), {}, None).ask("one")


def test_completions_remember_nothing():
    client = FakeClient()
    session = CompletionSession(client, Terminal(io.StringIO(), io.StringIO()), {"model": "m"})
    session.ask("one")
    session.ask("two")
    assert client.bodies == [{"model": "m", "prompt": "one"}, {"model": "m", "prompt": "two"}]


def test_an_error_between_two_messages_of_a_person_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    lines = iter(["one", "", "two"])

    def read(prompt: str) -> str:
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", read)
    client, out = FakeClient(), io.StringIO()
    client.failure = ApiError("too long")
    converse(ChatSession(client, Terminal(Person(), out), {}, None), Terminal(Person(), out))
    assert len(client.bodies) == 2
    assert capsys.readouterr().err == "error: too long\n" * 2


@pytest.mark.parametrize("command", ["/exit", "/quit"])
def test_a_command_ends_the_conversation(monkeypatch: pytest.MonkeyPatch, command: str):
    lines = iter(["one", command, "two"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    client, terminal = FakeClient(), Terminal(Person(), io.StringIO())
    converse(ChatSession(client, terminal, {}, None), terminal)
    assert len(client.bodies) == 1
    assert next(lines) == "two"


def test_an_error_of_a_pipes_only_message_is_raised():
    client = FakeClient()
    client.failure = ApiError("no")
    terminal = Terminal(io.StringIO("one"), io.StringIO())
    with pytest.raises(ApiError):
        converse(ChatSession(client, terminal, {}, None), terminal)
