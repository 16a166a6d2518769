"""Base classes of parsers: one pass over the text, which waits for more of it."""

from __future__ import annotations

import string
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from llmstack_output_parsers.protocols import ParsedDelta, ToolCallDelta
from llmstack_output_parsers.reader import MAX_HELD_CHARS, SPACES, Reader, Steps

ToolSchemas = Mapping[str, Mapping[str, Any]]
"""The functions that may be called: name to the JSON schema of its parameters."""

_ID_CHARACTERS = string.ascii_letters + string.digits


def new_call_id() -> str:
    """An id in the form of OpenAI's."""
    import secrets  # late: it loads OpenSSL, and a server's flags only need the names of parsers

    return f"call_{secrets.token_hex(12)}"


def new_short_call_id() -> str:
    """Nine letters and digits: templates of Mistral accept no other ids."""
    import secrets  # late, as above

    return "".join(secrets.choice(_ID_CHARACTERS) for _ in range(9))


class Parser(ABC):
    """Base of the parsers: `run` reads from `reader` and reports by `say`, `think` and `begin_call`.

    Attributes:
        kept_tokens: Special tokens that the parser has to see in the text.
        reader: The text.
    """

    kept_tokens: ClassVar[Sequence[str]] = ()

    def __init__(self) -> None:
        self.reader = Reader()
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[ToolCallDelta] = []
        self._begun: tuple[str, str] | None = None
        self._arguments: list[str] = []
        self._num_calls = 0
        self._spaces: list[str] = []
        self._num_spaces = 0
        self._is_edge = True
        self._steps: Iterator[None] = self.run()

    @abstractmethod
    def run(self) -> Steps[None]:
        """Parses the text up to its end."""

    def feed(self, text: str) -> ParsedDelta:
        self.reader.push(text)
        next(self._steps)
        return self._news()

    def finish(self) -> ParsedDelta:
        self.reader.end()
        for _ in self._steps:
            pass
        if self._num_calls == 0:
            self._content += self._spaces
        return self._news()

    def say(self, text: str) -> None:
        """Adds content. White space next to calls is omitted, since it is part of their notation."""
        if not self._is_edge:
            self._content.append(text)
            return
        self._spaces.append(text)
        self._num_spaces += len(text)
        if text.strip(SPACES) or self._num_spaces > MAX_HELD_CHARS:
            self._content += self._spaces
            self._clear_spaces()
            self._is_edge = False

    @property
    def num_held_chars(self) -> int:
        """Number of characters that were neither passed on nor dropped yet."""
        return self.reader.num_held_chars + self._num_spaces

    def think(self, text: str) -> None:
        """Adds text of the reasoning."""
        self._reasoning.append(text)

    def begin_call(self, name: str) -> None:
        """Begins a call; `add_arguments` refers to it until the next one."""
        self._end_delta()
        self._begun = self.new_id(), name
        self._num_calls += 1
        self._clear_spaces()
        self._is_edge = True

    def add_arguments(self, text: str) -> None:
        """Adds to the arguments' JSON text."""
        if text:
            self._arguments.append(text)

    def new_id(self) -> str:
        """An id for a call."""
        return new_call_id()

    def _clear_spaces(self) -> None:
        self._spaces.clear()
        self._num_spaces = 0

    def _end_delta(self) -> None:
        if self._begun is None and not self._arguments:
            return
        call_id, name = self._begun or (None, None)
        self._calls.append(ToolCallDelta(self._num_calls - 1, call_id, name, "".join(self._arguments)))
        self._begun = None
        self._arguments.clear()

    def _news(self) -> ParsedDelta:
        self._end_delta()
        news = ParsedDelta("".join(self._content), "".join(self._reasoning), tuple(self._calls))
        self._content.clear()
        self._reasoning.clear()
        self._calls.clear()
        return news


class ToolParser(Parser):
    """Base of the parsers of tool calls.

    Attributes:
        strict_tags: The exact text before and after a call, if it is a JSON object between tags: a grammar can then
            hold calls to the schemas of strict functions. None for formats that no grammar is written for.
        tools: The functions that may be called.
    """

    strict_tags: tuple[str, str] | None = None

    def __init__(self, tools: ToolSchemas | None = None, *, call_ids: Callable[[], str] | None = None) -> None:
        """`call_ids` returns the id of each call; None means random ids."""
        super().__init__()
        self.tools: ToolSchemas = tools or {}
        self._call_ids = call_ids

    def new_id(self) -> str:
        """An id for a call."""
        return self.random_id() if self._call_ids is None else self._call_ids()

    def random_id(self) -> str:
        """An id in the form that the model's template expects."""
        return new_call_id()

    def say_until(self, markers: Sequence[str]) -> Steps[str]:
        """Passes on content up to the first marker, and returns the marker; empty at the end."""
        while True:
            before, found = self.reader.take_until(markers)
            if before:
                self.say(before)
            if found:
                return found
            if self.reader.is_ended:
                return ""
            yield
