"""Parsers of messages that a grammar has constrained to tool calls."""

from __future__ import annotations

from collections.abc import Callable

from llmstack_output_parsers.json_calls import JsonCallParser
from llmstack_output_parsers.parser import ToolParser
from llmstack_output_parsers.reader import Steps


class RequiredCallsParser(JsonCallParser):
    """An array of calls: `[{"name": ..., "parameters": {...}}, ...]`."""

    def run(self) -> Steps[None]:
        """Parses the array; all other text is content."""
        self.reader.hold()
        character = yield from self.reader.take_spaces()
        before = self.reader.release()
        if character == "[":
            yield from self.read_array(before)
        else:
            self.say(before)
        while not self.reader.is_ended:
            self.say(self.reader.take_rest())
            yield
        self.say(self.reader.take_rest())


class NamedCallParser(ToolParser):
    """The arguments of one function, without a name."""

    def __init__(self, name: str, *, call_ids: Callable[[], str] | None = None) -> None:
        super().__init__(call_ids=call_ids)
        self._name = name

    def run(self) -> Steps[None]:
        """Parses one call from the first character on."""
        yield from self.reader.take_spaces()
        if (yield from self.reader.peek()):
            self.begin_call(self._name)
        while not self.reader.is_ended:
            self.add_arguments(self.reader.take_rest())
            yield
        self.add_arguments(self.reader.take_rest())
