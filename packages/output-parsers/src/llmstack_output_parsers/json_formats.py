"""Tool calls as JSON objects, in the formats of Hermes, Llama 3 and Mistral."""

from __future__ import annotations

import string

from llmstack_output_parsers.json_calls import MAX_NAME_CHARS, JsonCallParser
from llmstack_output_parsers.parser import new_short_call_id
from llmstack_output_parsers.reader import Steps

TOOL_CALL, TOOL_CALL_END = "<tool_call>", "</tool_call>"
MAX_STRAY_CHARS = 16
_STRAY = frozenset("}], \n")
PYTHON_TAG = "<|python_tag|>"
TOOL_CALLS, CALL_ID, ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_ID_CHARACTERS = frozenset(string.ascii_letters + string.digits)
_NAME_CHARACTERS = _ID_CHARACTERS | frozenset("_-.")


class HermesToolParser(JsonCallParser):
    """Calls of Hermes, Qwen 2.5 and Qwen 3, as `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

    kept_tokens = (TOOL_CALL, TOOL_CALL_END)
    starts = (TOOL_CALL,)
    strict_tags = (f"{TOOL_CALL}\n", f"\n{TOOL_CALL_END}")

    def run(self) -> Steps[None]:
        """Parses content and calls, alternating."""
        while before := (yield from self.say_until((TOOL_CALL,))):
            while (yield from self.read_call(before, is_certain=True)):
                before = ""
                if (yield from self.reader.take_spaces()) != "{":
                    yield from self._close()
                    break

    def _close(self) -> Steps[None]:
        """Takes the closing tag, even after a superfluous bracket, which small models write."""
        self.reader.hold()
        yield from self.reader.take_while(_STRAY, MAX_STRAY_CHARS)
        is_closed = yield from self.reader.take_if(TOOL_CALL_END)
        held = self.reader.release()
        if not is_closed:
            self.say_refused(held)


class Llama3JsonToolParser(JsonCallParser):
    """Calls of Llama 3, as `{"name": ..., "parameters": {...}}` at the start of the message or after the tag.

    Several calls are separated by `;`. An object that does not name a known function is content.
    """

    kept_tokens = (PYTHON_TAG,)
    starts = kept_tokens

    def run(self) -> Steps[None]:
        """Parses calls first, then content."""
        before = ""
        while True:
            yield from self._read_calls(before)
            before = yield from self.say_until((PYTHON_TAG,))
            if not before:
                return

    def _read_calls(self, before: str) -> Steps[None]:
        while (yield from self.read_call(before, is_certain=before == PYTHON_TAG)):
            before = ""
            character = yield from self.reader.take_spaces()
            if character == ";":
                before = self.reader.take(1)
            elif character != "{":
                return


class XlamToolParser(JsonCallParser):
    """Calls of xLAM, as an array `[{"name": ..., "arguments": {...}}, ...]` at the start of the message.

    An array that does not name a known function is content.
    """

    kept_tokens = ()

    def run(self) -> Steps[None]:
        """Parses calls first, then content."""
        self.reader.hold()
        character = yield from self.reader.take_spaces()
        spaces = self.reader.release()
        if character == "[":
            yield from self.read_array(spaces, is_certain=False)
        else:
            self.say(spaces)
        yield from self.say_until(())


class MistralToolParser(JsonCallParser):
    """Calls of Mistral's models, as any of their tokenizers formats them.

    The formats are `[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]`, and `[TOOL_CALLS]name{...}` for each call.
    In the second, `[CALL_ID]...` and `[ARGS]` may precede the arguments.
    """

    kept_tokens = (TOOL_CALLS, CALL_ID, ARGUMENTS)
    starts = (TOOL_CALLS,)

    def random_id(self) -> str:
        """An id of nine characters, as the template requires."""
        return new_short_call_id()

    def run(self) -> Steps[None]:
        """Parses content and calls, alternating."""
        while before := (yield from self.say_until((TOOL_CALLS,))):
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
            self.say_refused(before + held)
