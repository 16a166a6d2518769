"""Rows: objects of a class as lists of their fields, in the order of the class."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from operator import attrgetter, itemgetter
from random import Random
from typing import Any, Final, get_args, get_type_hints

from llmstack_engine_core.messages.kinds import (
    BOOLEAN,
    COUNT,
    NO_DEFAULT,
    CodecError,
    Kind,
    are_counters,
    as_it_is,
    integer,
    list_of,
    number,
    optional,
)
from llmstack_types.field_facts import facts_of

_KINDS: Final[Mapping[Any, Kind]] = {bool: BOOLEAN, int: COUNT}
MIN_COUNTS: Final = 4
"""So many counts are cheaper to check together than one by one."""

_NONE: Final[Mapping[str, Kind]] = {}


@dataclass(frozen=True, slots=True)
class Row(Kind):
    """The kind of the objects of `cls`."""

    cls: type = object


def row(
    cls: type[Any],
    field_to_kind: Mapping[str, Kind] = _NONE,
    *,
    absent: Collection[str] = (),
    prefix: str = "",
    check: Callable[[Any], None] | None = None,
    has_key: bool = False,
) -> Row:
    """Declares how objects of a dataclass or of a named tuple's class travel.

    Args:
        cls: The class. A field that is a bool, a count, has a declared range, or has a `Kind` in its
            annotation needs no other declaration.
        field_to_kind: The kinds of the other fields.
        absent: Fields that do not travel, and have their defaults on arrival.
        prefix: What stands before the names of fields in refusals.
        check: Refuses combinations of fields, by a `CodecError`.
        has_key: Whether refusals carry the first field, as `CodecError.request_id`.

    Raises:
        TypeError: A field has no kind, or there is no such field.
    """
    kinds = _kinds(cls, field_to_kind, absent)
    names = tuple(kinds)
    todo = [(index, kind.unpack, kind.default, prefix + name) for index, (name, kind) in enumerate(kinds.items())]
    counts = [index for index, kind in enumerate(kinds.values()) if kind is COUNT]
    get_counts = itemgetter(*counts) if len(counts) >= MIN_COUNTS else None
    others = [one for one in todo if one[0] not in counts]
    length, is_tuple = len(names), issubclass(cls, tuple)
    defaults = cls._field_defaults if is_tuple else {one.name: one.default for one in fields(cls) if one.init}
    order = list(get_type_hints(cls))
    # A class gives its last fields their defaults itself, among them new lists; a tuple has to be given all.
    end = len(order) if is_tuple else 1 + max((index for index, name in enumerate(order) if name in kinds), default=-1)
    between = [(i, defaults[name]) for i, name in enumerate(order[:end]) if name in absent and name in defaults]

    def unpack(value: object, name: str) -> object:
        if type(value) is not list or len(value) != length:
            raise CodecError(f"{name} must be a list of {length} items")
        values, left = value, todo
        try:
            if get_counts is not None and are_counters(get_counts(values)):
                left = others  # all counts were checked at once, in C
            for index, unpack_one, default, field in left:
                value = values[index]
                values[index] = default if value is None and default is not NO_DEFAULT else unpack_one(value, field)
            for index, default in between:
                values.insert(index, default)
            made = tuple.__new__(cls, values) if is_tuple else cls(*values)
            if check is not None:
                check(made)
        except CodecError as error:
            if has_key:
                with suppress(CodecError):
                    error.request_id = todo[0][1](values[0], names[0])
            raise
        return made

    return Row(unpack, _drawer(cls, kinds, check), _packer(cls, kinds, prefix), cls=cls)


def _kinds(cls: type, given: Mapping[str, Kind], absent: Collection[str]) -> dict[str, Kind]:
    hints = get_type_hints(cls, include_extras=True)
    ranges = _kinds_of_ranges(cls, hints) if is_dataclass(cls) else {}
    kinds: dict[str, Kind | None] = {
        name: given.get(name) or ranges.get(name) or getattr(hint, "__metadata__", [_KINDS.get(hint)])[0]
        for name, hint in hints.items()
        if name not in absent
    }
    wrong = {*given, *absent} - {*hints} | {name for name, kind in kinds.items() if not isinstance(kind, Kind)}
    if wrong:
        raise TypeError(f"{cls.__name__} has no field, or the field no kind: {', '.join(sorted(wrong))}")
    return {name: kind for name, kind in kinds.items() if kind}


def _kinds_of_ranges(cls: type, hints: Mapping[str, object]) -> dict[str, Kind]:
    """The kinds of the fields that declare a range of numbers."""
    kinds = {}
    for name, facts in facts_of(cls).items():
        if facts.minimum is None or facts.maximum is None:
            continue
        types = {hints[name], *get_args(hints[name])}
        if float in types:
            low = math.nextafter(facts.minimum, math.inf) if facts.excludes_minimum else facts.minimum
            kind = number(low, facts.maximum)
        else:
            kind = integer(int(facts.minimum), int(facts.maximum))
        kinds[name] = optional(kind) if type(None) in types else kind
    return kinds


def _packer(cls: type, kinds: Mapping[str, Kind], prefix: str) -> Callable[[object, str], Any]:
    names = tuple(kinds)
    todo = [
        (index, kind.pack, prefix + name)
        for index, (name, kind) in enumerate(kinds.items())
        if kind.pack is not as_it_is
    ]
    if names == getattr(cls, "_fields", None) and not todo:
        return as_it_is
    get = attrgetter(*names) if names else list

    def pack(made: Any, name: str) -> list[object]:
        values = list(get(made)) if len(names) > 1 else [get(made)] if names else []
        for index, pack_one, field in todo:
            value = values[index]
            if value is not None:
                values[index] = pack_one(value, field)
        return values

    return pack


def _drawer(cls: type, kinds: Mapping[str, Kind], check: Callable[[object], None] | None) -> Callable[[Random], Any]:
    def draw(pick: Random) -> object:
        made = cls(**{name: kind.draw(pick) for name, kind in kinds.items()})
        try:
            if check is not None:
                check(made)
        except CodecError:
            return draw(pick)
        return made

    return draw


def tuple_of(*kinds: Kind) -> Kind:
    """A tuple with one value of each kind."""

    def unpack(value: object, name: str) -> tuple[object, ...]:
        packed = list_of(value, name, len(kinds))
        return tuple(kind.unpack(one, name) for kind, one in zip(kinds, packed, strict=True))

    def pack(value: tuple[object, ...], name: str) -> list[object]:
        return [kind.pack(one, name) for kind, one in zip(kinds, value, strict=True)]

    return Kind(unpack, lambda pick: tuple(kind.draw(pick) for kind in kinds), pack)


def mapping(pairs: Kind) -> Kind:
    """A dictionary, as lists of pairs: messages hold no maps."""
    return Kind(
        lambda value, name: dict(pairs.unpack(value, name)),
        lambda pick: dict(pairs.draw(pick)),
        lambda value, name: pairs.pack([*value.items()], name),
    )
