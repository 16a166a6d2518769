"""Calls as Hermes, Qwen 2.5 and Qwen 3 write them."""

from __future__ import annotations

from llmstack_output_parsers.json_calls import JsonCallParser
from llmstack_output_parsers.reader import Steps

START, END = "<tool_call>", "</tool_call>"


class HermesToolParser(JsonCallParser):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of them."""

    kept_tokens = (START, END)

    def run(self) -> Steps[None]:
        """Content and calls in turn."""
        while before := (yield from self.say_until((START,))):
            while (yield from self.read_call(before, is_certain=True)):
                before = ""
                if (yield from self.reader.take_spaces()) != "{":
                    yield from self.reader.take_if(END)
                    break
