"""Sessions over a connection: a conversation, or a series of completions."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Generator, Iterator
from typing import Any, Protocol

from llmstack_command.client.terminal import Terminal
from llmstack_command.errors import ApiError


class StreamClient(Protocol):
    """A server that streams answers."""

    def stream(self, route: str, body: dict[str, Any]) -> Generator[dict[str, Any], None, None]:
        """The events of one streamed answer; raises ApiError."""
        ...


class Asker(Protocol):
    """Sends one message of the user to the model."""

    def ask(self, message: str) -> None:
        """Streams the answer to the terminal; raises ApiError."""
        ...


class ChatSession:
    """A conversation, whose messages are sent with each request."""

    def __init__(
        self, client: StreamClient, terminal: Terminal, body: dict[str, Any], system_prompt: str | None
    ) -> None:
        """`body` has the model's name and the sampling fields of every request."""
        self._client = client
        self._terminal = terminal
        self._body = body
        self.messages: list[dict[str, str]] = []
        if system_prompt is not None:
            self.messages.append({"role": "system", "content": system_prompt})

    def ask(self, message: str) -> None:
        """Shows and keeps the answer, or its part before Ctrl-C. A message whose request failed is dropped.

        Raises:
            ApiError: The server refuses, or the request failed.
        """
        self.messages.append({"role": "user", "content": message})
        said: list[str] = []
        try:
            events = self._client.stream("/chat/completions", {**self._body, "messages": self.messages})
            show_answer(self._terminal, events, said)
        except ApiError:
            self.messages.pop()
            raise
        self.messages.append({"role": "assistant", "content": "".join(said)})


class CompletionSession:
    """Independent prompts, continued one by one."""

    def __init__(self, client: StreamClient, terminal: Terminal, body: dict[str, Any]) -> None:
        """`body` has the model's name and the sampling fields of every request."""
        self._client = client
        self._terminal = terminal
        self._body = body

    def ask(self, message: str) -> None:
        """Shows the continuation of a text.

        Raises:
            ApiError: The server refuses, or the request failed.
        """
        show_answer(self._terminal, self._client.stream("/completions", {**self._body, "prompt": message}), [])


def show_answer(terminal: Terminal, events: Generator[dict[str, Any], None, None], said: list[str]) -> None:
    """Streams one answer and collects its text in `said`; Ctrl-C aborts it and its request."""
    try:
        with contextlib.closing(events):  # aborts the request on the server
            for event in events:
                for text, is_aside in _texts(event):
                    if not is_aside:
                        said.append(text)  # first: text that was shown before Ctrl-C belongs to the answer
                    terminal.write(text, is_aside=is_aside)
    except KeyboardInterrupt:
        if not terminal.is_interactive:
            raise
    terminal.end_answer()


def _texts(event: dict[str, Any]) -> Iterator[tuple[str, bool]]:
    """The new pieces of text of one event, each with whether it is reasoning."""
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or {}
        reasoning = delta.get("reasoning_content") or delta.get("reasoning")
        if reasoning:
            yield reasoning, True
        text = delta.get("content") or choice.get("text")
        if text:
            yield text, False


def converse(asker: Asker, terminal: Terminal) -> None:
    """Answers all messages of the terminal. In an interactive session, errors are shown and the session continues.

    Raises:
        ApiError: The message of a pipe could not be answered.
    """
    for message in terminal.messages():
        try:
            asker.ask(message)
        except ApiError as error:
            if not terminal.is_interactive:
                raise
            print(f"error: {error}", file=sys.stderr)
