"""Sessions over a connection: a conversation, or a series of completions."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator, Iterator, Sequence
from typing import Any, Protocol

from llmstack_command.client.chat_commands import ChatCommands, Conversation, ConversationEnd
from llmstack_command.client.terminal import Terminal
from llmstack_command.errors import ApiError


class StreamClient(Protocol):
    """A server that streams answers."""

    def model_names(self) -> Sequence[str]:
        """The names of its models; raises ApiError."""
        ...

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
        self._conversation = Conversation(body, system_prompt)
        self._commands = ChatCommands(self._conversation, client.model_names)

    @property
    def messages(self) -> list[dict[str, str]]:
        """The messages so far."""
        return self._conversation.messages

    def ask(self, message: str) -> None:
        """Shows and keeps the answer, or its part before Ctrl-C. A message whose request failed is dropped.

        In an interactive session, a line that starts with a slash is a command.

        Raises:
            ApiError: The server refuses, the request failed, or a command cannot be done.
            ConversationEnd: A command ended the conversation.
        """
        if self._terminal.is_interactive and message.startswith("/"):
            if not message.startswith("//"):
                self._terminal.note(self._commands.run(message))
                return
            message = message[1:]
        self._answer(message)

    def _answer(self, message: str) -> None:
        self.messages.append({"role": "user", "content": message})
        body = {**self._conversation.body, "messages": self.messages}
        if self._terminal.is_interactive:
            body["stream_options"] = {"include_usage": True}
        said: list[str] = []
        try:
            show_answer(self._terminal, self._client.stream("/chat/completions", body), said)
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
    speed = _Speed()
    try:
        with contextlib.closing(events):  # aborts the request on the server
            for event in events:
                speed.add(event)
                for text, is_aside in _texts(event):
                    if not is_aside:
                        said.append(text)  # first: text that was shown before Ctrl-C belongs to the answer
                    terminal.write(text, is_aside=is_aside)
    except KeyboardInterrupt:
        if not terminal.is_interactive:
            raise
    terminal.end_answer()
    if terminal.is_interactive and str(speed):
        terminal.note(str(speed))


class _Speed:
    """The time to the first token, and the tokens per second after it."""

    def __init__(self) -> None:
        self._start_s = time.perf_counter()
        self._first_s: float | None = None
        self._last_s = self._start_s
        self._num_tokens = 0

    def add(self, event: dict[str, Any]) -> None:
        """Follows one event of the answer."""
        self._num_tokens = (event.get("usage") or {}).get("completion_tokens", self._num_tokens)
        if any(text for text, _ in _texts(event)):
            self._last_s = time.perf_counter()
            self._first_s = self._first_s or self._last_s

    def __str__(self) -> str:
        """One line, empty where the server has not counted the tokens."""
        if self._first_s is None or self._num_tokens < 2 or self._last_s <= self._first_s:
            return ""
        rate = (self._num_tokens - 1) / (self._last_s - self._first_s)
        first_ms = 1000 * (self._first_s - self._start_s)
        return f"{self._num_tokens} tokens, {rate:.1f} per second, the first after {first_ms:.0f} ms"


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
        except ConversationEnd:
            return
        except ApiError as error:
            if not terminal.is_interactive:
                raise
            terminal.show_error(str(error))
