"""Tool calls of MiniCPM 5: XML with a function's name and parameters."""

from __future__ import annotations

from collections.abc import Mapping

from llmstack_output_parsers.schema_values import Schemas, json_text
from llmstack_output_parsers.tagged_calls import TaggedToolParser

_CDATA, _CDATA_END = "<![CDATA[", "]]>"
_ENTITIES: Mapping[str, str] = {"&lt;": "<", "&gt;": ">", "&quot;": '"', "&apos;": "'", "&amp;": "&"}


class MiniCPM5ToolParser(TaggedToolParser):
    """Calls of MiniCPM 5: `<function name="NAME"><param name="KEY">VALUE</param></function>`.

    A value is text with the five entities of XML, or CDATA. It is passed on when it is complete, except for a long one,
    which is passed on as it is.
    """

    kept_tokens = ("<function", "</function>", "<param", "</param>")
    function, function_end = '<function name="', "</function>"
    parameter, parameter_end = '<param name="', "</param>"
    passes_strings = False

    @property
    def no_content(self) -> tuple[str, ...]:
        """All tags: some of the kept tokens are parts of them."""
        return (self.function, self.function_end, self.parameter, self.parameter_end)

    def argument_of(self, text: str, schemas: Schemas, schema: Mapping[str, object]) -> str:
        """The value of an element's text, as JSON."""
        value = _plain(text)
        return json_text(value) if schemas.is_string(schema) else schemas.converted(value, schema)


def _plain(text: str) -> str:
    """The plain text of an element."""
    if text.startswith(_CDATA) and text.endswith(_CDATA_END):
        return text[len(_CDATA) : -len(_CDATA_END)]
    for entity, char in _ENTITIES.items():  # not by the package `xml`, which imports what servers need
        text = text.replace(entity, char)
    return text
