"""A conversation with a model, and a series of completions: what both commands do once connected."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Generator, Iterator
from typing import Any, Protocol

from llmstack_command.client.errors import ApiError
from llmstack_command.client.terminal import Terminal


class StreamClient(Protocol):
    """The server, by shape."""

    def stream(self, route: str, body: dict[str, Any]) -> Generator[dict[str, Any], None, None]:
        """The events of one streamed answer; raises ApiError."""
        ...


class Asker(Protocol):
    """Puts one message of the user to the model."""

    def ask(self, message: str) -> None:
        """Shows the answer as it comes; raises ApiError."""
        ...


class ChatSession:
    """A conversation that remembers what was said."""

    def __init__(
        self, client: StreamClient, terminal: Terminal, body: dict[str, Any], system_prompt: str | None
    ) -> None:
        """`body` holds the model's name and the sampling fields of every request."""
        self._client = client
        self._terminal = terminal
        self._body = body
        self.messages: list[dict[str, str]] = []
        if system_prompt is not None:
            self.messages.append({"role": "system", "content": system_prompt})

    def ask(self, message: str) -> None:
        """Shows and remembers the answer, or as much of it as came before Ctrl-C; a failed question is forgotten.

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
    """Prompts that are continued one by one; nothing is remembered."""

    def __init__(self, client: StreamClient, terminal: Terminal, body: dict[str, Any]) -> None:
        """`body` holds the model's name and the sampling fields of every request."""
        self._client = client
        self._terminal = terminal
        self._body = body

    def ask(self, message: str) -> None:
        """Shows how the model goes on.

        Raises:
            ApiError: The server refuses, or the request failed.
        """
        show_answer(self._terminal, self._client.stream("/completions", {**self._body, "prompt": message}), [])


def show_answer(terminal: Terminal, events: Generator[dict[str, Any], None, None], said: list[str]) -> None:
    """Writes one answer as it comes and collects its text in `said`; Ctrl-C ends it, and its request, early."""
    try:
        with contextlib.closing(events):  # which tells the server that nobody reads on
            for event in events:
                for text, is_aside in _texts(event):
                    if not is_aside:
                        said.append(text)  # first: what a person has seen, and then stopped, was said
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
    """Answers everything the terminal brings; between a person's messages an error is shown and the talk goes on.

    Raises:
        ApiError: The only message, a pipe's, could not be answered.
    """
    for message in terminal.messages():
        try:
            asker.ask(message)
        except ApiError as error:
            if not terminal.is_interactive:
                raise
            print(f"error: {error}", file=sys.stderr)
