"""Calls as Hermes, Qwen 2.5 and Qwen 3 write them."""

from __future__ import annotations

from llmstack_output_parsers.json_calls import JsonCallParser
from llmstack_output_parsers.reader import Steps

START, END = "<tool_call>", "</tool_call>"
MAX_STRAY_CHARS = 16
_STRAY = frozenset("}], \n")


class HermesToolParser(JsonCallParser):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of them."""

    kept_tokens = (START, END)

    def run(self) -> Steps[None]:
        """Content and calls in turn."""
        while before := (yield from self.say_until((START,))):
            while (yield from self.read_call(before, is_certain=True)):
                before = ""
                if (yield from self.reader.take_spaces()) != "{":
                    yield from self._close()
                    break

    def _close(self) -> Steps[None]:
        """Takes the closing tag, with a bracket too many before it, which small models write."""
        self.reader.hold()
        yield from self.reader.take_while(_STRAY, MAX_STRAY_CHARS)
        is_closed = yield from self.reader.take_if(END)
        held = self.reader.release()
        if not is_closed:
            self.say(held)
