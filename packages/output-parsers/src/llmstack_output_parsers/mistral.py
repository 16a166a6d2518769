"""Calls as the models of Mistral write them, in the form of any of their tokenizers."""

from __future__ import annotations

import string

from llmstack_output_parsers.json_calls import MAX_NAME_CHARS, JsonCallParser
from llmstack_output_parsers.parser import new_short_call_id
from llmstack_output_parsers.reader import Steps

START, CALL_ID, ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_ID_CHARACTERS = frozenset(string.ascii_letters + string.digits)
_NAME_CHARACTERS = _ID_CHARACTERS | frozenset("_-.")


class MistralToolParser(JsonCallParser):
    """`[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]`, or `[TOOL_CALLS]name{...}` for each call.

    In the second form `[CALL_ID]...` and `[ARGS]` may stand before the arguments.
    """

    kept_tokens = (START, CALL_ID, ARGUMENTS)

    def random_id(self) -> str:
        """Nine characters."""
        return new_short_call_id()

    def run(self) -> Steps[None]:
        """Content and calls in turn."""
        while before := (yield from self.say_until((START,))):
            self.reader.hold()
            character = yield from self.reader.take_spaces()
            before += self.reader.release()
            if character == "[":
                yield from self.read_array(before)
            elif character == "{":
                yield from self.read_call(before, is_certain=True)
            else:
                yield from self._read_named(before)

    def _read_named(self, before: str) -> Steps[None]:
        self.reader.hold()
        name = yield from self.reader.take_while(_NAME_CHARACTERS, MAX_NAME_CHARS)
        if (yield from self.reader.take_if(CALL_ID)):
            yield from self.reader.take_while(_ID_CHARACTERS, MAX_NAME_CHARS)
        yield from self.reader.take_if(ARGUMENTS)
        yield from self.reader.take_spaces()
        has_begun = bool(name) and (yield from self.pass_arguments(name))
        held = self.reader.release()
        if not has_begun:
            self.say(before + held)
