"""Objects of a JSON schema without properties that it does not declare."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from llmstack_structured_output.walk import Schema, target_of

_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("prefixItems", "items")
_CHOICES = ("anyOf", "oneOf")
_IN_PLACE = ("$ref", "allOf", *_CHOICES)
_OF_OBJECTS = ("properties", "required", "minProperties", "maxProperties")
_OF_OTHERS = ("additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames")
_COPY = "llmstack open copy "
_MAX_ADDED = 20_000

Names = dict[str, None]


class TooManyNamesError(ValueError):
    """Alternatives would have to repeat too many names of properties."""


def without_undeclared(schema: Schema) -> Schema:
    """The schema, in which objects that declare `properties` and say nothing of others have no others.

    What several schemas declare together, by `allOf` or by a reference with siblings, is declared; so is what an
    object requires. Where it needs more properties than it declares, by `minProperties`, it may have others.

    Raises:
        TooManyNamesError: It becomes too large.
    """
    return _Closing(schema).result()


class _Closing:
    """`close` is for a schema that alone describes a value, `open` for one of several that describe it together."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._num_added = 0
        self._copies: Schema = {}
        self._copy_names: dict[str, str] = {}

    def result(self) -> Schema:
        closed: Schema = self._close(self._root)
        return closed | {"$defs": closed.get("$defs", {}) | self._copies} if self._copies else closed

    def _close(self, node: Any, names: Names | None = None) -> Any:
        """`names`: Of the properties that the schemas around a branch declare; None where they declare none."""
        if not isinstance(node, dict):
            return self._over({}, names) if node is True and names is not None else node
        if names is None and self._only_refers(node):
            return self._inner(node) | ({"allOf": [self._close(node["allOf"][0])]} if "allOf" in node else {})
        members = list(self._together(node))
        choices = [(member, key) for member in members for key in _CHOICES if isinstance(member.get(key), list)]
        if len(choices) != 1 or choices[0][0] is not node:
            branches = [branch for member, key in choices for branch in member[key]]
            members += [one for branch in branches for one in self._all_of(branch)]
            return self._over_members(node, names, members)
        if _says_of_others(members):
            return self._open(node)
        declared, key = _declared(names, members), choices[0][1]
        branches = [self._close(branch, declared if _may_be_object(branch) else None) for branch in node[key]]
        return self._open(node | {key: []}) | {key: branches}  # the order of the keys is that of the properties

    def _over_members(self, node: Schema, names: Names | None, members: list[Schema]) -> Schema:
        declared = _declared(names, members)
        opened = self._open(node)
        return opened if declared is None or _says_of_others(members) else self._over(opened, declared)

    def _over(self, node: Schema, names: Names | None) -> Schema:
        """The object with these properties alone; those that it does not describe itself are described elsewhere."""
        own, least = node.get("properties", {}), node.get("minProperties")
        if names is None or not isinstance(own, dict) or (isinstance(least, int) and least > len(names)):
            return node
        others = {name: True for name in names if name not in own}
        self._num_added += len(others)
        if self._num_added > _MAX_ADDED:
            raise TooManyNamesError
        return node | {"properties": own | others, "additionalProperties": False}

    def _open(self, node: Any) -> Any:
        if not isinstance(node, dict):
            return node
        opened = self._inner(node)
        for key in ("allOf", *_CHOICES):
            if isinstance(node.get(key), list):
                opened[key] = [self._open(entry) for entry in node[key]]
        if isinstance(node.get("$ref"), str):
            opened["$ref"] = self._open_copy(node["$ref"])
        return opened

    def _open_copy(self, reference: str) -> str:
        """A reference to the open form of its target."""
        target = target_of(self._root, reference)
        if not isinstance(target, dict) or not isinstance(self._root.get("$defs", {}), dict):
            return reference
        if reference not in self._copy_names:
            name = self._copy_names[reference] = f"{_COPY}{len(self._copy_names)}"
            self._copies[name] = self._open({key: target[key] for key in target if key not in ("$defs", "definitions")})
        return f"#/$defs/{self._copy_names[reference].replace(' ', '%20')}"

    def _inner(self, node: Schema) -> Schema:
        """The schema with its parts closed that describe other values: properties, items and definitions."""
        closed = dict(node)
        for key in _MAPS:
            if isinstance(node.get(key), dict):
                closed[key] = {name: self._close(value) for name, value in node[key].items()}
        for key in _LISTS:
            if isinstance(node.get(key), list):
                closed[key] = [self._close(entry) for entry in node[key]]
        for key in ("additionalProperties", "items", "additionalItems"):
            if isinstance(node.get(key), dict):
                closed[key] = self._close(node[key])
        return closed

    def _only_refers(self, node: Schema) -> bool:
        """Whether the schema is another one, by a reference or an `allOf` of one."""
        applied = [key for key in _IN_PLACE if key in node]
        if any(key in node for key in (*_OF_OBJECTS, *_OF_OTHERS)):
            return False
        parts = node.get("allOf")
        return applied == ["$ref"] or (applied == ["allOf"] and isinstance(parts, list) and len(parts) == 1)

    def _together(self, node: Schema) -> Iterator[Schema]:
        """The schemas that describe a value together: this one, those of `allOf`, and targets of references."""
        stack, seen = [node], set()
        while stack:
            one: Any = stack.pop()
            if isinstance(one, dict) and id(one) not in seen:
                seen.add(id(one))
                yield one
                if isinstance(one.get("allOf"), list):
                    stack += reversed(one["allOf"])
                if isinstance(one.get("$ref"), str):
                    stack.append(target_of(self._root, one["$ref"]))

    def _all_of(self, node: Any) -> Iterator[Schema]:
        """The schemas, with those of the choices among them."""
        stack, seen = [node], set()
        while stack:
            for one in self._together(stack.pop()):
                if id(one) not in seen:
                    seen.add(id(one))
                    yield one
                    stack += [branch for key in _CHOICES if isinstance(one.get(key), list) for branch in one[key]]


def _declared(names: Names | None, members: list[Schema]) -> Names | None:
    """The names that schemas declare together with those around them; None where no schema has `properties`."""
    if names is None and not any(isinstance(member.get("properties"), dict) for member in members):
        return None
    declared = dict(names or {})
    for member in members:
        for key, kind in (("properties", dict), ("required", list)):
            entries = member.get(key)
            declared |= {name: None for name in entries if isinstance(name, str)} if isinstance(entries, kind) else {}
    return declared


def _says_of_others(members: list[Schema]) -> bool:
    return any(key in member for member in members for key in _OF_OTHERS)


def _may_be_object(node: Any) -> bool:
    types = node.get("type", "object") if isinstance(node, dict) else "object"
    return "object" in types if isinstance(types, str | list) else True
