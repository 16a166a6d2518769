"""Tool calls as JSON after special tokens, with the name inside or in front."""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import ClassVar

from llmstack_output_parsers.json_calls import MAX_NAME_CHARS, JsonCallParser
from llmstack_output_parsers.json_formats import TOOL_CALL, TOOL_CALL_END
from llmstack_output_parsers.parser import new_call_id
from llmstack_output_parsers.reader import Steps

_NAME_CHARACTERS = frozenset(string.ascii_letters + string.digits + "_-.")


class MarkedJsonToolParser(JsonCallParser):
    """Base of the parsers of objects, or arrays of them, after a marker.

    Attributes:
        preambles: Texts that may stand between a marker and the JSON, in this order.
        closings: Texts that may stand after it, in this order.
    """

    preambles: ClassVar[Sequence[str]] = ()
    closings: ClassVar[Sequence[str]] = ()

    def run(self) -> Steps[None]:
        """Parses content and calls, alternating."""
        while before := (yield from self.say_until(self.starts)):
            self.reader.hold()
            yield from self.take_each(self.preambles)
            before += self.reader.release()
            if (yield from self.read_after(before)):
                yield from self.take_each(self.closings)
                if self.reader.ends_within(self.closings):
                    self.reader.take_rest()  # the end of the text has cut a tag

    def take_each(self, texts: Sequence[str]) -> Steps[str]:
        """Takes the texts that are next, in their order, and white space around them; returns the next character."""
        for text in texts:
            yield from self.reader.take_spaces()
            yield from self.reader.take_if(text)
        return (yield from self.reader.take_spaces())

    def read_after(self, before: str) -> Steps[bool]:
        """Parses what follows the marker; False if it is no call, and content after `before`."""
        character = yield from self.reader.peek()
        if character == "[":
            yield from self.read_array(before)
            return True
        if character == "{":
            return (yield from self.read_call(before, is_certain=True))
        self.say_refused(before)
        return False


class HunyuanToolParser(MarkedJsonToolParser):
    """Calls of Hunyuan A13B, as `<tool_calls>[{"name": ..., "arguments": {...}}]</tool_calls>`."""

    kept_tokens = ("<tool_calls>", "</tool_calls>")
    starts = ("<tool_calls>",)
    closings = ("</tool_calls>",)


class MiniMaxToolParser(MarkedJsonToolParser):
    """Calls of MiniMax M1, as objects between `<tool_calls>` and `</tool_calls>`."""

    kept_tokens = ("<tool_calls>", "</tool_calls>")
    starts = ("<tool_calls>",)
    closings = ("</tool_calls>",)

    def read_after(self, before: str) -> Steps[bool]:
        """Parses one object after the other."""
        is_read = yield from super().read_after(before)
        while is_read and (yield from self.reader.take_spaces()) == "{":
            is_read = yield from self.read_call(is_certain=True)
        return is_read


class LongCatToolParser(MarkedJsonToolParser):
    """Calls of LongCat, as `<longcat_tool_call>{"name": ..., "arguments": {...}}</longcat_tool_call>`."""

    kept_tokens = ("<longcat_tool_call>", "</longcat_tool_call>")
    starts = ("<longcat_tool_call>",)
    closings = ("</longcat_tool_call>",)


class Granite20bToolParser(MarkedJsonToolParser):
    """Calls of Granite 20B Function Calling, as `<function_call> {"name": ..., "arguments": {...}}` for each."""

    kept_tokens = ("<function_call>",)
    starts = ("<function_call>",)


class GraniteToolParser(MarkedJsonToolParser):
    """Calls of Granite 3 and 4, as an array or an object after `<|tool_call|>` or `<tool_call>`."""

    kept_tokens = ("<|tool_call|>", TOOL_CALL, TOOL_CALL_END)
    starts = ("<|tool_call|>", TOOL_CALL)
    closings = (TOOL_CALL_END,)


class Phi4MiniToolParser(MarkedJsonToolParser):
    """Calls of Phi-4-mini, as `functools[{"name": ..., "arguments": {...}}]`."""

    starts = ("functools",)

    def read_after(self, before: str) -> Steps[bool]:
        """The word alone is content."""
        if (yield from self.reader.peek()) == "[":
            return (yield from super().read_after(before))
        self.say(before)
        return False


class InternLMToolParser(MarkedJsonToolParser):
    """Calls of InternLM, as `<|action_start|><|plugin|>{"name": ..., "parameters": {...}}<|action_end|>`."""

    kept_tokens = ("<|action_start|>", "<|plugin|>", "<|action_end|>")
    starts = ("<|action_start|>",)
    preambles = ("<|plugin|>",)
    closings = ("<|action_end|>",)


class InklingToolParser(MarkedJsonToolParser):
    """Calls of Inkling, as `{"name": ..., "args": {...}}` in a block of their own."""

    kept_tokens = ("<|content_invoke_tool_json|>", "<|content_text|>", "<|end_message|>")
    starts = (kept_tokens[0],)
    argument_keys = ("args", "arguments")
    closings = ("<|end_message|>",)


class HeadedJsonToolParser(MarkedJsonToolParser):
    """Base of the parsers of calls with the function's name in front of the arguments.

    Attributes:
        separators: Texts between the name and the arguments, all of them.
    """

    name_characters: ClassVar[frozenset[str]] = _NAME_CHARACTERS
    separators: ClassVar[Sequence[str]]

    def read_after(self, before: str) -> Steps[bool]:
        """Parses the name and the arguments."""
        self.reader.hold()
        head = yield from self.reader.take_while(self.name_characters, MAX_NAME_CHARS)
        is_call = bool(head)
        for text in self.separators:
            yield from self.reader.take_spaces()
            is_call = is_call and (yield from self.reader.take_if(text))
        if is_call:
            yield from self.reader.take_spaces()
            is_call = yield from self.pass_arguments(self.name_in(head))
        held = self.reader.release()
        if not is_call:
            self.say_refused(before + held)
        return is_call

    def name_in(self, head: str) -> str:
        """The function's name in the text before the arguments."""
        return head


class KimiK2ToolParser(HeadedJsonToolParser):
    """Calls of Kimi K2, as `<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}<|tool_call_end|>`.

    The text before the arguments is the id of the call, which the chat template expects in later messages.
    """

    kept_tokens = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
                   "<|tool_call_argument_begin|>", "<|tool_call_end|>")  # fmt: skip
    starts = ("<|tool_calls_section_begin|>", "<|tool_call_begin|>")
    preambles = ("<|tool_call_begin|>",)
    name_characters = _NAME_CHARACTERS | frozenset(":")
    separators = ("<|tool_call_argument_begin|>",)
    closings = ("<|tool_call_end|>", "<|tool_calls_section_end|>")
    _call_id = ""

    def name_in(self, head: str) -> str:
        """The last word before the number of the call."""
        self._call_id = head if ":" in head else ""
        return head.partition(":")[0].rpartition(".")[2] or head

    def random_id(self) -> str:
        """The model's own id."""
        return self._call_id or new_call_id()


class DeepSeekV3ToolParser(HeadedJsonToolParser):
    """Calls of DeepSeek V3 and R1: `function`, a separator, the name, and the arguments in a fenced block."""

    kept_tokens = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>",
                   "<｜tool▁sep｜>")  # fmt: skip
    starts = ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>")
    preambles = ("<｜tool▁call▁begin｜>", "function", "<｜tool▁sep｜>")
    separators = ("```json",)
    closings = ("```", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>")


class DeepSeekV31ToolParser(HeadedJsonToolParser):
    """Calls of DeepSeek V3.1: the name, a separator and the arguments."""

    kept_tokens = DeepSeekV3ToolParser.kept_tokens
    starts = DeepSeekV3ToolParser.starts
    preambles = ("<｜tool▁call▁begin｜>",)
    separators = ("<｜tool▁sep｜>",)
    closings = ("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>")
