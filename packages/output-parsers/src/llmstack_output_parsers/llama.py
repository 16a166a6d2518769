"""Calls as Llama 3 writes them: JSON without a marker, or behind `<|python_tag|>`."""

from __future__ import annotations

from llmstack_output_parsers.json_calls import JsonCallParser
from llmstack_output_parsers.reader import Steps

TAG = "<|python_tag|>"


class Llama3JsonToolParser(JsonCallParser):
    """`{"name": ..., "parameters": {...}}` at the start of the message or behind the tag; `;` between several.

    An object that does not name a known function is content.
    """

    kept_tokens = (TAG,)

    def run(self) -> Steps[None]:
        """Calls first, then content."""
        before = ""
        while True:
            yield from self._read_calls(before)
            before = yield from self.say_until((TAG,))
            if not before:
                return

    def _read_calls(self, before: str) -> Steps[None]:
        while (yield from self.read_call(before, is_certain=before == TAG)):
            before = ""
            character = yield from self.reader.take_spaces()
            if character == ";":
                before = self.reader.take(1)
            elif character != "{":
                return
