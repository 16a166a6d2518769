"""JSON schemas: reading, limits, and the call of the grammar library."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from llguidance import LLMatcher

from llmstack_structured_output import errors
from llmstack_structured_output.limits import GrammarLimits
from llmstack_structured_output.regexes import check_regex

_COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
MAX_COUNT = 100_000
# All that indented JSON needs. Models that may write any number of blanks do: they find no end between two tokens.
WHITESPACE = r" |\r?\n[ \t]{0,24}"


def schema_grammar(
    param: str,
    schema: str | Mapping[str, Any],
    limits: GrammarLimits,
    *,
    disable_any_whitespace: bool = False,
    whitespace_pattern: str | None = None,
) -> str:
    """The grammar of the JSON texts that are valid under a schema.

    Raises:
        InvalidRequestError: It is no schema, or over a limit.
    """
    value = read_schema(param, schema, limits)
    if whitespace_pattern is not None:
        check_regex("structured_outputs.whitespace_pattern", whitespace_pattern, limits)
    options: dict[str, Any] = {"lenient": False, "whitespace_flexible": False}
    if not disable_any_whitespace:
        options["whitespace_pattern"] = whitespace_pattern or WHITESPACE
    try:
        return LLMatcher.grammar_from_json_schema(value, overrides=options)  # type: ignore[arg-type]  # its TypedDict
    except (ValueError, RecursionError) as error:
        raise errors.invalid_json_schema(param, errors.one_line(str(error))) from error


def read_schema(param: str, schema: str | Mapping[str, Any], limits: GrammarLimits) -> dict[str, Any]:
    """A schema as an object, within the limits; `true` allows anything.

    Raises:
        InvalidRequestError: It is no schema, or over a limit.
    """
    value = read_json(param, schema, limits)
    if value is True:
        return {}
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
