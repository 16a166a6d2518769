"""Numbers of patterns of a JSON schema that one string has to match at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from llmstack_structured_output.walk import Schema, target_of

_CHOICES = ("anyOf", "oneOf")
_MAPS = ("properties", "patternProperties")
_LISTS = ("prefixItems", "items")
_OTHERS = ("items", "additionalProperties", "additionalItems")
_MAX_VISITS = 20_000


def has_more_patterns(root: Schema, most: int) -> bool:
    """Whether some string has to match more than `most` patterns, by `allOf`, references and choices together.

    Of choices the branch with most patterns counts. Of a value within several choices those of one choice at a time
    count. It looks at a bounded number of schemas: a schema with more of them that describe a value together is left
    to the limit of time.
    """
    return _Search(root, most).finds_more()


class _Search:
    def __init__(self, root: Schema, most: int) -> None:
        self._root = root
        self._most = most
        self._num_visits = 0
        self._seen: set[frozenset[int]] = set()

    def finds_more(self) -> bool:
        stack: list[list[Schema]] = [[self._root], *self._definitions()]
        while stack:
            nodes = stack.pop()
            identity = frozenset(map(id, nodes))
            if identity in self._seen:
                continue
            self._seen.add(identity)
            if self._number(nodes, frozenset()) > self._most:
                return True
            members = self._together(nodes)
            stack += _parts(members)
            for branch in (branch for branches in _choices(members) for branch in branches):
                stack += [[branch], *_parts([*members, *self._together([branch])])]
                if self._num_visits > _MAX_VISITS:
                    return False
        return False

    def _definitions(self) -> Iterator[list[Schema]]:
        for key in ("$defs", "definitions"):
            if isinstance(definitions := self._root.get(key), dict):
                yield from ([one] for one in definitions.values() if isinstance(one, dict))

    def _together(self, nodes: list[Schema]) -> list[Schema]:
        """These schemas, those of `allOf`, and targets of references; not the branches of choices."""
        stack: list[Any] = [*nodes]
        members: dict[int, Schema] = {}
        while stack:
            one = stack.pop()
            if not isinstance(one, dict) or id(one) in members:
                continue
            self._num_visits += 1
            members[id(one)] = one
            stack += one["allOf"] if isinstance(one.get("allOf"), list) else []
            if isinstance(one.get("$ref"), str):
                stack.append(target_of(self._root, one["$ref"]))
        return [*members.values()]

    def _number(self, nodes: list[Schema], above: frozenset[int]) -> int:
        """The number of patterns of one string under these schemas. `above`: Branches around them."""
        members = self._together(nodes)
        number = sum(isinstance(member.get("pattern"), str) for member in members)
        for branches in _choices(members):
            inner = [branch for branch in branches if id(branch) not in above and self._num_visits <= _MAX_VISITS]
            number += max((self._number([branch], above | {id(branch)}) for branch in inner), default=0)
        return number


def _parts(members: list[Schema]) -> Iterator[list[Schema]]:
    """The schemas of each inner value."""
    place_to_nodes: dict[tuple[str, object], list[Schema]] = {}
    for member in members:
        for place, node in _inner(member):
            if isinstance(node, dict):
                place_to_nodes.setdefault(place, []).append(node)
    yield from place_to_nodes.values()


def _inner(node: Schema) -> Iterator[tuple[tuple[str, object], Any]]:
    for key in _MAPS:
        if isinstance(node.get(key), dict):
            yield from (((key, name), inner) for name, inner in node[key].items())
    for key in _LISTS:
        if isinstance(node.get(key), list):
            yield from (((key, index), inner) for index, inner in enumerate(node[key]))
    for key in _OTHERS:
        if isinstance(node.get(key), dict):
            yield (key, None), node[key]


def _choices(members: list[Schema]) -> Iterator[list[Schema]]:
    for member in members:
        for key in _CHOICES:
            if isinstance(member.get(key), list):
                yield [branch for branch in member[key] if isinstance(branch, dict)]
