"""Parsers of messages that a grammar has constrained to tool calls."""

from __future__ import annotations

from collections.abc import Callable

from llmstack_output_parsers.json_calls import JsonCallParser
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
        yield from self.say_until(())

    def say_refused(self, text: str) -> None:
        """Drops text that was cut before a call begins: it is no content, as the array is the model's only text."""
        if not self.reader.is_ended:
            self.say(text)


class NamedCallParser(JsonCallParser):
    """The arguments of one function, without a name."""

    def __init__(self, name: str, *, call_ids: Callable[[], str] | None = None) -> None:
        super().__init__(call_ids=call_ids)
        self._name = name

    def run(self) -> Steps[None]:
        """Parses one call from the first character on; text that is not an object is content."""
        self.reader.hold()
        character = yield from self.reader.take_spaces()
        spaces = self.reader.release()
        if character != "{":
            self.say(spaces if character else "")
        else:
            self.begin_call(self._name)
            yield from self.pass_object()
        yield from self.say_until(())
