"""Constraint on the text of one completion, under vLLM's field names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class StructuredOutputsParams:
    """A constraint on one completion: exactly one of the first six fields is set.

    Pure data: `llmstack_llm.admission` checks it and gives it its normal form, in which `json` and `structural_tag`
    are texts and `choice` is a tuple, so that equal constraints are equal and hashable.

    Attributes:
        json: A JSON schema; the completion is a JSON text that is valid under it. The order of an object's properties
            is that of the schema.
        regex: The completion matches it as a whole.
        choice: The completion is one of these strings.
        grammar: A context-free grammar in Lark's or GBNF's notation.
        json_object: The completion is any JSON object.
        structural_tag: Text in which begun tags hold what their schemas say; JSON in OpenAI's and xgrammar's form.
        disable_any_whitespace: JSON comes without spaces and line breaks.
        whitespace_pattern: A regular expression of what may stand between JSON's tokens; None leaves it free.
        disable_additional_properties: Objects that declare `properties` and say nothing of others have no others.
            False is JSON Schema's letter, by which they may have any; None is the server's setting.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: tuple[str, ...] | list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | Mapping[str, Any] | None = None
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None
    disable_additional_properties: bool | None = None
