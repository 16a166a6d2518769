"""Conversion of bare text to JSON values, by the schema of a parameter."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

_JSON_TYPES = {
    "integer": (int, float),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
}
_LITERALS = {"true": "true", "false": "false", "null": "null", "none": "null"}
_MAX_ALTERNATIVES = 32
MAX_SUBSCHEMAS = 256
"""Maximum number of schemas that are read for the types of one value; references may form circles."""

_NUMBERS = frozenset({"number", "integer"})
_TYPE_TO_KEYWORDS: Mapping[str, tuple[str, ...]] = {
    "object": ("properties", "additionalProperties", "patternProperties", "required", "propertyNames"),
    "array": ("items", "prefixItems", "minItems", "maxItems", "uniqueItems", "contains"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "string": ("pattern", "minLength", "maxLength"),
}


def json_text(value: object) -> str:
    """JSON without escapes for characters outside ASCII."""
    return json.dumps(value, ensure_ascii=False)


class Schemas:
    """The schema of a function's parameters, in which references are followed."""

    def __init__(self, parameters: Mapping[str, object] | None) -> None:
        self._root: Mapping[str, Any] = parameters or {}

    def of_property(self, name: str) -> Mapping[str, Any]:
        """The schema of one parameter; empty where there is none."""
        return self.property_of(self._root, name)

    def property_of(self, schema: Mapping[str, object], name: str) -> Mapping[str, Any]:
        """The schema of a property; empty where there is none."""
        for part in self._parts(schema):
            properties = part.get("properties")
            found = properties.get(name) if isinstance(properties, Mapping) else None
            if isinstance(found, Mapping):
                return found
        return {}

    def items_of(self, schema: Mapping[str, object]) -> Mapping[str, Any]:
        """The schema of the entries of an array; empty where there is none."""
        found = (part.get("items") for part in self._parts(schema))
        return next((items for items in found if isinstance(items, Mapping)), {})

    def types_of(self, schema: Mapping[str, object]) -> frozenset[str]:
        """The types that the schema permits, as far as it names or implies any; empty if it does not."""
        return self._types_of(schema, _Budget())

    def is_string(self, schema: Mapping[str, object]) -> bool:
        """Whether the value is a string; it is if the schema names no type."""
        return self.types_of(schema) <= {"string"}

    def converted(self, text: str, schema: Mapping[str, object]) -> str:
        """The JSON text of the value, if the text is JSON of a type in the schema; else a string."""
        bare = text.strip()
        literal = _LITERALS.get(bare.lower(), bare)
        try:
            value = json.loads(literal, parse_constant=_refuse)
        except (ValueError, RecursionError):
            return json_text(text)
        types = self.types_of(schema)
        is_meant = value is None or any(_is_a(value, name) for name in types)
        if is_meant and "string" in types and self._is_listed(text, schema) and not self._is_listed(value, schema):
            return json_text(text)
        return literal if is_meant else json_text(text)

    def _is_listed(self, value: object, schema: Mapping[str, object]) -> bool:
        """Whether the value is one of the values that the schema lists."""
        return any(
            listed == value and isinstance(listed, bool) == isinstance(value, bool)
            for part in self._parts(schema)
            for listed in _listed_values(part)
        )

    def _types_of(self, schema: Mapping[str, object], budget: _Budget) -> frozenset[str]:
        """The types that the schema itself and all that it refers to permit together."""
        if not budget.spend():
            return frozenset()
        sets = [_own_types(schema)]
        target = self._target(schema)
        if target is not None:
            sets.append(self._types_of(target, budget))
        for key in ("anyOf", "oneOf"):
            alternatives = [self._types_of(part, budget) for part in _subschemas(schema, key)]
            sets.append(frozenset().union(*alternatives))
        sets += [self._types_of(part, budget) for part in _subschemas(schema, "allOf")]
        types: frozenset[str] = frozenset()
        for found in sets:
            wide = found | _NUMBERS if "number" in found else found
            types = (types & wide or types) if types else wide
        return types | {"null"} if types and schema.get("nullable") is True else types

    def _parts(self, schema: Mapping[str, object]) -> Iterator[Mapping[str, Any]]:
        """The schema and all that it refers to, each with its own keywords."""
        budget, waiting = _Budget(), [schema]
        while waiting and budget.spend():
            part = waiting.pop(0)
            yield part
            target = self._target(part)
            waiting += [] if target is None else [target]
            for key in ("allOf", "anyOf", "oneOf"):
                waiting += _subschemas(part, key)

    def _target(self, schema: Mapping[str, object]) -> Mapping[str, Any] | None:
        """The schema in the same document to which `$ref` points; None if there is none."""
        reference = schema.get("$ref")
        if not isinstance(reference, str) or not reference.startswith("#"):
            return None
        found: object = self._root
        for step in reference[1:].split("/")[1:_MAX_ALTERNATIVES]:
            key = step.replace("~1", "/").replace("~0", "~")
            if isinstance(found, list | tuple) and key.isdecimal():
                found = found[int(key)] if int(key) < len(found) else None
            else:
                found = found.get(key) if isinstance(found, Mapping) else None
        return found if isinstance(found, Mapping) else None


class _Budget:
    """The number of schemas that may still be read."""

    def __init__(self) -> None:
        self._num_left = MAX_SUBSCHEMAS

    def spend(self) -> bool:
        """Whether one more may be read."""
        self._num_left -= 1
        return self._num_left >= 0


def _own_types(schema: Mapping[str, object]) -> frozenset[str]:
    """The types in the keywords of the schema itself: named, or those of its listed values, or implied."""
    named = schema.get("type")
    if isinstance(named, str):
        return frozenset({named})
    if isinstance(named, list | tuple):
        return frozenset(entry for entry in named if isinstance(entry, str))
    listed = frozenset(map(_type_of, _listed_values(schema)))
    return listed or frozenset(
        name for name, keywords in _TYPE_TO_KEYWORDS.items() if any(keyword in schema for keyword in keywords)
    )


def _listed_values(schema: Mapping[str, object]) -> list[object]:
    if "const" in schema:
        return [schema["const"]]
    listed = schema.get("enum")
    return list(listed) if isinstance(listed, list | tuple) else []


def _subschemas(schema: Mapping[str, object], key: str) -> list[Mapping[str, Any]]:
    found = schema.get(key)
    entries = found[:_MAX_ALTERNATIVES] if isinstance(found, list | tuple) else ()
    return [entry for entry in entries if isinstance(entry, Mapping)]


def _type_of(value: object) -> str:
    if value is None:
        return "null"
    return next((name for name in ("boolean", "integer", "array", "object") if _is_a(value, name)), "string")


def _is_a(value: object, type_name: str) -> bool:
    if isinstance(value, bool):  # a number to Python
        return type_name == "boolean"
    return isinstance(value, _JSON_TYPES.get(type_name, ()))


def _refuse(constant: str) -> None:
    raise ValueError(constant)
