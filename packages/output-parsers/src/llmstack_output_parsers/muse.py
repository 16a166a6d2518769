"""Messages of Muse Glimmer: recipients for reasoning, calls and the answer."""

from __future__ import annotations

import string

from llmstack_output_parsers.json_calls import MAX_NAME_CHARS
from llmstack_output_parsers.parser import Parser
from llmstack_output_parsers.reader import Steps
from llmstack_output_parsers.tagged_calls import TaggedToolParser

START, MESSAGE, END, LAST = "<|start|>", "<|message|>", "<|eom|>", "<|eot|>"
_ENDS = (END, LAST, START)
_NAME_CHARACTERS = frozenset(string.ascii_letters + string.digits + "_-.")


class MuseReasoningParser(Parser):
    """Messages as `<|start|>assistant to=NAME<|message|>...<|eom|>`: those to `self` are reasoning, others content.

    Attributes:
        start, end: The texts around reasoning.
    """

    start, end = f"to=self{MESSAGE}", END
    kept_tokens = (START, MESSAGE, END, LAST)

    def __init__(self, *, is_open: bool | None = None) -> None:
        """`is_open`: Whether the prompt ends inside reasoning."""
        super().__init__()
        self._is_open = bool(is_open)

    def run(self) -> Steps[None]:
        """Parses messages in any order; text outside of them is content."""
        if self._is_open:
            yield from self._pass(is_reasoning=True)
        while (yield from self.reader.peek()):
            recipient = yield from self._read_header()
            yield from self._pass(is_reasoning=recipient == "self")

    def _read_header(self) -> Steps[str]:
        """The recipient of the next message, whose header is taken; empty, and content, if there is no header."""
        self.reader.hold()
        yield from self.reader.take_spaces()
        yield from self.reader.take_if(START)
        yield from self.reader.take_if("assistant")
        yield from self.reader.take_spaces()
        recipient = ""
        if (yield from self.reader.take_if("to=")):
            recipient = yield from self.reader.take_while(_NAME_CHARACTERS, MAX_NAME_CHARS)
        is_header = yield from self.reader.take_if(MESSAGE)
        held = self.reader.release()
        if not is_header and not (self.reader.is_at_end and held.strip().startswith(START)):  # the end has cut a header
            self.say(held.replace(START, ""))
        return recipient if is_header else ""

    def _pass(self, *, is_reasoning: bool) -> Steps[None]:
        """Passes on the text of one message, and takes its end."""
        while True:
            text, marker = self.reader.take_until(_ENDS)
            if text:
                (self.think if is_reasoning else self.say)(text)
            if marker and is_reasoning:
                self.end_thinking()
            if marker or self.reader.is_ended:
                return
            yield


class MuseToolParser(TaggedToolParser):
    """Calls as `<atem:invoke name="NAME"><atem:parameter name="KEY">VALUE</atem:parameter></atem:invoke>`."""

    openings = ("<atem:function_calls>",)
    function, function_end = '<atem:invoke name="', "</atem:invoke>"
    parameter, parameter_end = '<atem:parameter name="', "</atem:parameter>"
    closings = ("</atem:function_calls>",)
    trims_lines = False

    def called_function(self, name: str) -> str:
        """The model writes `now.now` for a function `now` that has no group."""
        head, _, tail = name.partition(".")
        return head if head == tail and head in self.tools and name not in self.tools else name
