"""JSON schemas: reading, limits, and the call of the grammar library."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from llguidance import LLMatcher

from llmstack_structured_output import errors
from llmstack_structured_output.limits import GrammarLimits
from llmstack_structured_output.numbers import NotExactError, with_exact_numbers
from llmstack_structured_output.patterns_together import has_more_patterns
from llmstack_structured_output.regexes import check_regex, with_ascii_classes
from llmstack_structured_output.undeclared import TooManyNamesError, without_undeclared
from llmstack_structured_output.used_up_patterns import without_used_up_patterns
from llmstack_structured_output.walk import changed
from llmstack_types import StructuredOutputsParams

_COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
MAX_COUNT = 100_000
# All that indented JSON needs. Models that may write any number of blanks do: they find no end between two tokens.
WHITESPACE = r" |\r?\n[ \t]{0,24}"


@dataclass(frozen=True, slots=True)
class SchemaOptions:
    """How JSON is written under a schema.

    Attributes:
        has_whitespace: Whether there may be white space between the tokens of JSON.
        whitespace_pattern: A regular expression of it; None is `WHITESPACE`.
        is_closed: Objects that declare properties and say nothing of others have no others.
    """

    has_whitespace: bool = True
    whitespace_pattern: str | None = None
    is_closed: bool = True

    @classmethod
    def of(cls, params: StructuredOutputsParams) -> SchemaOptions:
        """The options of a constraint."""
        is_closed = params.disable_additional_properties is not False
        return cls(not params.disable_any_whitespace, params.whitespace_pattern, is_closed)

    def of_library(self, limits: GrammarLimits) -> dict[str, Any]:
        """The library's names of them.

        Raises:
            InvalidRequestError: The pattern is over a limit.
        """
        pattern = WHITESPACE
        if self.whitespace_pattern is not None:
            check_regex("structured_outputs.whitespace_pattern", self.whitespace_pattern, limits)
            pattern = with_ascii_classes(self.whitespace_pattern)
        options: dict[str, Any] = {"lenient": False, "whitespace_flexible": False}
        return options | {"whitespace_pattern": pattern} if self.has_whitespace else options


def schema_grammar(param: str, schema: str | Mapping[str, Any], limits: GrammarLimits, options: SchemaOptions) -> str:
    """The grammar of the JSON texts that are valid under a schema.

    Raises:
        InvalidRequestError: It is no schema, or over a limit.
    """
    value = prepared_schema(param, schema, limits, options)
    try:
        return LLMatcher.grammar_from_json_schema(value)
    except (ValueError, RecursionError) as error:
        raise errors.invalid_json_schema(param, errors.one_line(str(error))) from error


def prepared_schema(
    param: str, schema: str | Mapping[str, Any], limits: GrammarLimits, options: SchemaOptions
) -> dict[str, Any]:
    """A checked schema as the library takes it, with its options.

    Raises:
        InvalidRequestError: It is no schema, or over a limit.
    """
    value = read_schema(param, schema, limits)
    try:
        value = without_undeclared(value) if options.is_closed else value
        prepared: dict[str, Any] = changed(changed(value, with_exact_numbers), without_used_up_patterns)
    except TooManyNamesError:
        raise errors.schema_too_complex(param, "its alternatives declare too many properties") from None
    except NotExactError as error:
        raise errors.invalid_json_schema(param, str(error)) from None
    return prepared | {"x-guidance": options.of_library(limits)}


def read_schema(param: str, schema: str | Mapping[str, Any], limits: GrammarLimits) -> dict[str, Any]:
    """A schema as an object, within the limits; `true` allows anything.

    Raises:
        InvalidRequestError: It is no schema, or over a limit.
    """
    value = read_json(param, schema, limits)
    if value is True:
        return {}
    if value is False:
        raise errors.invalid_json_schema(param, "the schema false allows no value at all")
    if not isinstance(value, dict):
        raise errors.invalid_json_schema(param, "expected an object or true")
    _check_entries(param, value, limits)
    return value


def read_json(param: str, text: str | Mapping[str, Any], limits: GrammarLimits) -> Any:
    """The value of a JSON text; checks its size and depth.

    Raises:
        InvalidRequestError: It is no JSON, or over a limit.
    """
    try:
        if not isinstance(text, str):
            text = json.dumps(text, ensure_ascii=False, allow_nan=False)
        num_bytes = len(text.encode())
        value = json.loads(text, parse_constant=_refuse_constant) if num_bytes <= limits.max_schema_bytes else None
    except RecursionError:
        raise errors.schema_too_complex(param, f"it is nested deeper than {limits.max_depth} levels") from None
    except (TypeError, ValueError) as error:  # no JSON, half a surrogate pair, an integer of thousands of digits
        raise errors.invalid_json_schema(param, "it is not valid JSON") from error
    if num_bytes > limits.max_schema_bytes:
        raise errors.schema_too_complex(param, f"it has more than {limits.max_schema_bytes} bytes")
    if any(depth > limits.max_depth for _, depth in _nodes(value)):
        raise errors.schema_too_complex(param, f"it is nested deeper than {limits.max_depth} levels")
    return value


def _check_entries(param: str, schema: dict[str, Any], limits: GrammarLimits) -> None:
    for node, _ in _nodes(schema):
        if not isinstance(node, dict):
            continue
        enum = node.get("enum")
        if isinstance(enum, list) and len(enum) > limits.max_enum:
            raise errors.schema_too_complex(param, f"an enum has more than {limits.max_enum} entries")
        reference = node.get("$ref")
        if isinstance(reference, str) and not reference.startswith("#") and "$id" not in schema:
            raise errors.invalid_json_schema(param, "a $ref may only point into the schema itself, and begins with '#'")
        patterns = [node.get("pattern"), *_keys(node.get("patternProperties"))]
        for pattern in patterns:
            if isinstance(pattern, str):
                check_regex(param, pattern, limits, is_in_schema=True)
        for name in _COUNTS:
            if isinstance(node.get(name), int | float) and node[name] > MAX_COUNT:
                raise errors.schema_too_complex(param, f"{name} is above {MAX_COUNT}")
    if has_more_patterns(schema, limits.max_patterns_together):
        reason = f"more than {limits.max_patterns_together} patterns have to match together"
        raise errors.schema_too_complex(param, reason)


def _keys(value: object) -> list[str]:
    return list(value) if isinstance(value, dict) else []


def _nodes(value: Any) -> Iterator[tuple[Any, int]]:
    """Every array and object with its depth, without recursion."""
    stack = [(value, 1)]
    while stack:
        node, depth = stack.pop()
        if isinstance(node, dict | list):
            yield node, depth
            children = node.values() if isinstance(node, dict) else node
            stack += [(child, depth + 1) for child in children]


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(name)
