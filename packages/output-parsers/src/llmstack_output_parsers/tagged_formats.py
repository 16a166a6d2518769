"""Formats of tool calls as tags around parameters, by model."""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from llmstack_output_parsers.json_formats import TOOL_CALL, TOOL_CALL_END
from llmstack_output_parsers.reader import Steps
from llmstack_output_parsers.tagged_calls import BLANKS, MAX_GAP_CHARS, NAME_CHARACTERS, TaggedToolParser

_NO_TYPES: Mapping[str, Any] = {"type": ["integer", "number", "boolean", "array", "object"]}
DSML = "｜DSML｜"
_ARG_KEY_END, _ARG_VALUE = "</arg_key>", "<arg_value>"
_MAX_SLIPS = 4


class Qwen3CoderToolParser(TaggedToolParser):
    """Calls of Qwen 3 Coder: `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`."""

    kept_tokens = (TOOL_CALL, TOOL_CALL_END)
    openings = (TOOL_CALL,)
    function, function_end = "<function=", "</function>"
    name_characters = NAME_CHARACTERS
    name_ends = (">",)
    parameter, parameter_end = "<parameter=", "</parameter>"
    other_parameter_ends = ("</parameter/>",)
    key_ends: ClassVar[Mapping[str, Mapping[str, Any] | None]] = {">": None}
    closings = (TOOL_CALL_END,)


class SeedOssToolParser(Qwen3CoderToolParser):
    """Calls between the tags of Seed-OSS."""

    kept_tokens = ("<seed:tool_call>", "</seed:tool_call>")
    openings = ("<seed:tool_call>",)
    closings = ("</seed:tool_call>",)


class MiMoToolParser(Qwen3CoderToolParser):
    """Calls of MiMo, whose values are strings, with their line ends."""

    key_ends: ClassVar[Mapping[str, Mapping[str, Any] | None]] = {">": {"type": "string"}}
    trims_lines = False


class MiniMaxM2ToolParser(TaggedToolParser):
    """Calls of MiniMax M2, as `<invoke name="NAME"><parameter name="KEY">VALUE</parameter></invoke>` between tags."""

    kept_tokens = ("<minimax:tool_call>", "</minimax:tool_call>")
    openings = ("<minimax:tool_call>",)
    function, function_end = '<invoke name="', "</invoke>"
    parameter, parameter_end = '<parameter name="', "</parameter>"
    closings = ("</minimax:tool_call>",)


class DotsToolParser(MiniMaxM2ToolParser):
    """Calls of dots3, which are those of MiniMax M2 between other tags."""

    kept_tokens = ("<dots_function_call>", "</dots_function_call>")
    openings, closings = ("<dots_function_call>",), ("</dots_function_call>",)


class DeepSeekV32ToolParser(TaggedToolParser):
    """Calls in the tags of DeepSeek V3.2, whose parameters say whether they are strings or JSON."""

    kept_tokens = (DSML,)
    openings = (f"<{DSML}function_calls>",)
    function, function_end = f'<{DSML}invoke name="', f"</{DSML}invoke>"
    parameter, parameter_end = f'<{DSML}parameter name="', f"</{DSML}parameter>"
    key_ends: ClassVar[Mapping[str, Mapping[str, Any] | None]] = {
        '" string="true">': {"type": "string"},
        '" string="false">': _NO_TYPES,
        '">': None,
    }
    closings = (f"</{DSML}function_calls>",)
    trims_lines = False

    @property
    def no_content(self) -> tuple[str, ...]:
        """All tags, since the token stands inside of them."""
        return (*self.openings, *self.closings, self.function_end, self.parameter, self.parameter_end)


class DeepSeekV4ToolParser(DeepSeekV32ToolParser):
    """Calls between the tags of DeepSeek V4."""

    openings = (f"<{DSML}tool_calls>",)
    closings = (f"</{DSML}tool_calls>",)


class Step3ToolParser(TaggedToolParser):
    """Calls of Step 3: `<steptml:invoke name="NAME"><steptml:parameter name="KEY">VALUE</steptml:parameter>...`."""

    kept_tokens = ("<｜tool_calls_begin｜>", "<｜tool_calls_end｜>", "<｜tool_call_begin｜>", "<｜tool_call_end｜>",
                   "<｜tool_sep｜>")  # fmt: skip
    openings = ("<｜tool_calls_begin｜>", "<｜tool_call_begin｜>")
    preambles = ("<｜tool_call_begin｜>", "function", "<｜tool_sep｜>")
    function, function_end = '<steptml:invoke name="', "</steptml:invoke>"
    parameter, parameter_end = '<steptml:parameter name="', "</steptml:parameter>"
    closings = ("<｜tool_call_end｜>", "<｜tool_calls_end｜>")


class GlmToolParser(TaggedToolParser):
    """Calls of GLM 4.5 and later: `<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>`."""

    kept_tokens: ClassVar[Sequence[str]] = (
        TOOL_CALL, TOOL_CALL_END, "<arg_key>", _ARG_KEY_END, _ARG_VALUE, "</arg_value>",
    )  # fmt: skip
    function, function_end = TOOL_CALL, TOOL_CALL_END
    name_characters = frozenset(string.ascii_letters + string.digits + "_-.:/")
    name_ends = ("\n", "<")
    parameter, parameter_end = "<arg_key>", "</arg_value>"
    key_ends: ClassVar[Mapping[str, Mapping[str, Any] | None]] = {_ARG_KEY_END: None}
    trims_lines = False

    def _take_one(self, texts: Sequence[str]) -> Steps[str]:
        """Leaves the tag after a name, which is the next one."""
        if texts is not self.name_ends:
            return (yield from super()._take_one(texts))
        return self.function if (yield from self.reader.take_spaces()) == "<" else ""

    def _skip_to_tag(self) -> Steps[str]:
        """Skips a closing tag that is written twice, and the second of two tags before a name."""
        yield from self._take_each_of(self._value_ends)
        tag = yield from super()._skip_to_tag()
        if tag == self.parameter:
            yield from self._take_each_of((self.parameter,))
        return tag

    def _read_key_end(self) -> Steps[str]:
        """Takes the tag before the value as well; models omit one of the two tags, or write one twice."""
        key_end = yield from self._take_each_of((_ARG_KEY_END,))
        value_start = yield from self._take_each_of((_ARG_VALUE,))
        if not value_start:
            yield from self.reader.take_while(BLANKS, MAX_GAP_CHARS)
        return _ARG_KEY_END if key_end or value_start else ""

    def _take_each_of(self, texts: Sequence[str]) -> Steps[str]:
        """Takes these texts, a few in any order, with the white space before each; returns the last."""
        last = ""
        for _ in range(_MAX_SLIPS):
            if not (yield from self.reader.look_ahead(self._is_next(texts))):
                break
            yield from self.reader.take_while(BLANKS, MAX_GAP_CHARS)
            last = yield from super()._take_one(texts)
        return last

    def _is_next(self, texts: Sequence[str]) -> Steps[bool]:
        """Whether one of the texts follows, after white space."""
        yield from self.reader.take_while(BLANKS, MAX_GAP_CHARS)
        return bool((yield from super()._take_one(texts)))

    def _begins_parameter(self) -> Steps[bool]:
        """Whether a name and both tags follow."""
        if not (yield from super()._begins_parameter()):
            return False
        yield from self.reader.take_while(BLANKS, MAX_GAP_CHARS)
        return (yield from self.reader.take_if(_ARG_VALUE)) or self.reader.ends_within((_ARG_VALUE,))

    def _goes_on_after(self, marker: str) -> Steps[bool]:
        """The closing tag may stand there twice."""
        if marker in self._value_ends:
            yield from self._take_each_of(self._value_ends)
        return (yield from super()._goes_on_after(marker))


class HunyuanV3ToolParser(GlmToolParser):
    """Calls of Hunyuan 3, where `<tool_sep>` stands after the name and `<tool_calls>` around all calls."""

    kept_tokens = (*GlmToolParser.kept_tokens, "<tool_calls>", "</tool_calls>", "<tool_sep>")
    openings = ("<tool_calls>",)
    closings = ("</tool_calls>",)

    def _skip_to_tag(self) -> Steps[str]:
        """Takes the tag after the name as well."""
        yield from self.reader.take_spaces()
        yield from self.reader.take_if("<tool_sep>")
        return (yield from super()._skip_to_tag())
