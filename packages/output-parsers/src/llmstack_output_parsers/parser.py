"""Base classes of parsers: one pass over the text, which waits for more of it."""

from __future__ import annotations

import string
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from llmstack_output_parsers.json_writer import JsonWriter
from llmstack_output_parsers.protocols import ParsedDelta, ToolCallDelta
from llmstack_output_parsers.reader import MAX_HELD_CHARS, SPACES, Reader, Steps, without_cut_tag
from llmstack_output_parsers.unclosed import UnclosedCalls

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
        self._writer: JsonWriter | None = None
        self._unclosed: UnclosedCalls | None = None
        self._is_chained = False
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
        self._end_call()
        return self._news()

    def say(self, text: str) -> None:
        """Adds content. White space next to calls is omitted, since it is part of their notation."""
        if self._writer is not None:
            self._writer.close()  # what follows a call is no part of it, whether or not it was complete
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
        num_pending_chars = 0 if self._writer is None else self._writer.num_pending_chars
        return self.reader.num_held_chars + self._num_spaces + num_pending_chars

    def think(self, text: str) -> None:
        """Adds text of the reasoning."""
        self._reasoning.append(text if self._unclosed is None else self._unclosed.add(text))

    def end_thinking(self) -> None:
        """Says that the reasoning so far was closed: a call in it is none."""
        if self._unclosed is not None:
            self._reasoning.append(self._unclosed.take())

    def expect_calls(self, starts: Sequence[str]) -> None:
        """Holds reasoning back from one of these texts on, until the reasoning is closed: a parser of calls follows."""
        self._is_chained = True
        self._unclosed = UnclosedCalls(starts) if starts else None

    def take_unclosed(self) -> str:
        """The reasoning that is held because it is not closed."""
        return "" if self._unclosed is None else self._unclosed.take()

    def take_call(self, end: str) -> str:
        """The text from the start of a call on, in reasoning that `end` ends: `end`, and the text before it if held."""
        if self._unclosed is None:
            return end if self._is_chained else ""  # a token that no parser of calls reads is no content
        self._reasoning.append(self._unclosed.add(end))
        has_start, text = self._unclosed.has_start, self._unclosed.take()
        if has_start:
            return text
        self._reasoning[-1] = (self._reasoning[-1] + text).removesuffix(end)
        return end

    def begin_call(self, name: str) -> None:
        """Begins a call; `add_arguments` refers to it until the next one."""
        self._end_call()
        self._writer = JsonWriter()
        self._begun = self.new_id(), name
        self._num_calls += 1
        self._clear_spaces()
        self._is_edge = True

    def add_arguments(self, text: str) -> None:
        """Adds to the arguments' JSON text; what is missing at the end of the call is added by itself."""
        self.writer.scan(text, 0, len(text))

    @property
    def writer(self) -> JsonWriter:
        """The writer of the arguments of the call that has begun."""
        if self._writer is None:
            raise RuntimeError("arguments are added to a call that has begun")
        return self._writer

    def new_id(self) -> str:
        """An id for a call."""
        return new_call_id()

    def _clear_spaces(self) -> None:
        self._spaces.clear()
        self._num_spaces = 0

    def _end_call(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._end_delta()

    def _end_delta(self) -> None:
        arguments = "" if self._writer is None else self._writer.take()
        if self._begun is None and not arguments:
            return
        call_id, name = self._begun or (None, None)
        self._calls.append(ToolCallDelta(self._num_calls - 1, call_id, name, arguments))
        self._begun = None

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

    @property
    def starts(self) -> Sequence[str]:
        """The texts that begin a call anywhere in a message; all begin with the same character."""
        return ()

    @property
    def no_content(self) -> tuple[str, ...]:
        """Control tokens, which are never content; all begin with the same character as the starts."""
        return tuple(self.kept_tokens)

    def has_call(self, text: str) -> bool:
        """Whether a message with this text has a call."""
        parser = type(self)(self.tools)
        return bool(parser.feed(text).tool_calls or parser.finish().tool_calls)

    def say_until(self, markers: Sequence[str]) -> Steps[str]:
        """Passes on content up to the first marker, and returns the marker; empty at the end."""
        found_texts = tuple(dict.fromkeys((*markers, *self.no_content)))
        while True:
            before, found = self.reader.take_until(found_texts) if found_texts else (self.reader.take_rest(), "")
            if self._num_calls and self.reader.is_ended and not found:
                before = without_cut_tag(before, found_texts, 1 if self._is_edge else 2)
            if before:
                self.say(before)
            if found in markers:
                return found
            if not found:
                if self.reader.is_ended:
                    return ""
                yield

    def say_refused(self, text: str) -> None:
        """Content that looked like a call, without control tokens; nothing if the end of the text has cut a call."""
        if self.reader.is_ended and any(start in text for start in self.starts):
            self.reader.take_rest()
            return
        for token in self.no_content:
            text = text.replace(token, "")
        self.say(text)
