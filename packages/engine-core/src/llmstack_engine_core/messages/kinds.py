"""Kinds of fields of messages.

A kind says how a value is checked when it arrives, how it is packed before msgpack takes it, and which values there
are, for fuzzers and tests. A refusal is a `CodecError` that names the field.

A kind of lists can be a column, one field of many rows, which travels at once: a message of 256 rows costs a handful of
calls into C instead of thousands of Python operations. Its `unpack` and `draw` take the number of rows at the end.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import accumulate, chain, repeat
from random import Random
from typing import Any, Final

from llmstack_types import LLMStackError

MAX_INT: Final = 2**63 - 1
MAX_TEXT_LENGTH: Final = 65_536
MAX_ITEMS: Final = 65_536
_LONG_TEXT_SHARE: Final = 0.01
NO_DEFAULT: Final = object()

Function = Callable[..., Any]


class CodecError(LLMStackError, ValueError):
    """Bytes that are no message of this protocol, or a message that has no bytes.

    Attributes:
        request_id: The request that the message was about, where that much could be read.
    """

    def __init__(self, message: str, request_id: str | None = None) -> None:
        super().__init__(message)
        self.request_id = request_id


def as_it_is(value: object, name: str) -> object:
    """The packing of values that msgpack takes."""
    return value


@dataclass(frozen=True, slots=True)
class Kind:
    """The type of a field, with its bounds.

    Attributes:
        unpack: From what msgpack has decoded, and the field's name, to the value; raises `CodecError`.
        draw: From a random generator to some value of this kind, often one at a bound.
        pack: From a value, and the field's name, to what msgpack takes.
        default: The value for which None travels, in a row; what has a default is neither packed nor unpacked then.
    """

    unpack: Function
    draw: Function
    pack: Function = as_it_is
    default: Any = NO_DEFAULT


def text(max_length: int = MAX_TEXT_LENGTH, min_length: int = 0) -> Kind:
    """A string of that many characters."""

    def unpack(value: object, name: str) -> str:
        if type(value) is not str or not min_length <= len(value) <= max_length:
            raise CodecError(f"{name} must be a string of {min_length} to {max_length} characters")
        return value

    def draw(pick: Random) -> str:
        length = max_length if pick.random() < _LONG_TEXT_SHARE else pick.randrange(9)
        return pick.choice("ar-\x00é€") * min(max(length, min_length), max_length)

    return Kind(unpack, draw)


def shortened(max_length: int) -> Kind:
    """A string, of which that many characters are sent."""
    kind = text(max_length)
    return Kind(kind.unpack, kind.draw, lambda value, name: value[:max_length])


def integer(low: int = 0, high: int = MAX_INT) -> Kind:
    """A whole number in [low, high]; a bool is none."""

    def unpack(value: object, name: str) -> int:
        if type(value) is not int or not low <= value <= high:
            raise CodecError(f"{name} must be an integer in [{low}, {high}]")
        return value

    some = [one for one in (low, 0, 1, 7, 1 << 20, high) if low <= one <= high]
    return Kind(unpack, lambda pick: pick.choice(some))


def number(low: float = -math.inf, high: float = math.inf) -> Kind:
    """A finite number in [low, high], as a float."""

    def unpack(value: Any, name: str) -> float:
        if type(value) not in (float, int) or not low <= value <= high or not -math.inf < value < math.inf:
            raise CodecError(f"{name} must be a finite number in [{low}, {high}]")
        return float(value)

    some = [one for one in (low, high, -1.5, 0.0, 0.25, 1.0, 1e9) if low <= one <= high and math.isfinite(one)]
    return Kind(unpack, lambda pick: pick.choice(some))


def _boolean(value: object, name: str) -> bool:
    if type(value) is not bool:
        raise CodecError(f"{name} must be a boolean")
    return value


BOOLEAN: Final = Kind(_boolean, lambda pick: pick.random() < 0.5)
COUNT: Final = integer()


def optional(kind: Kind) -> Kind:
    """None, or a value of `kind`."""
    return replace(kind, draw=lambda pick: None if pick.random() < 0.5 else kind.draw(pick), default=None)


def either(first: Kind, second: Kind) -> Kind:
    """A plain value of one of two kinds."""

    def unpack(value: object, name: str) -> object:
        try:
            return first.unpack(value, name)
        except CodecError:
            return second.unpack(value, name)

    return Kind(unpack, lambda pick: pick.choice((first, second)).draw(pick))


def member(members: Iterable[Enum]) -> Kind:
    """One of some members of an enumeration of texts or of numbers, as its value."""
    value_to_member = {one.value: one for one in members}

    def unpack(value: object, name: str) -> Enum:
        if type(value) not in (str, int) or value not in value_to_member:
            raise CodecError(f"{name} must be one of {', '.join(map(str, value_to_member))}")
        return value_to_member[value]

    return Kind(unpack, lambda pick: pick.choice([*value_to_member.values()]))


def word(words: Sequence[str]) -> Kind:
    """One of some words."""

    def unpack(value: object, name: str) -> str:
        if type(value) is not str or value not in words:
            raise CodecError(f"{name} must be one of {', '.join(words)}")
        return value

    return Kind(unpack, lambda pick: pick.choice(words))


def blob(item_size: int = 1, num_items: int | None = None) -> Kind:
    """Bytes, in whole items of that size; any number of them, or just so many."""

    def unpack(value: object, name: str) -> bytes:
        if type(value) is not bytes or len(value) % item_size:
            raise CodecError(f"{name} must be bytes, in items of {item_size}")
        if num_items is not None and len(value) != item_size * num_items:
            raise CodecError(f"{name} must be {item_size * num_items} bytes")
        return value

    def draw(pick: Random) -> bytes:
        return pick.randbytes(item_size * (pick.randrange(4) if num_items is None else num_items))

    return Kind(unpack, draw)


def list_of(value: object, name: str, length: int | None = None) -> list[object]:
    """Refuses what is no list, or none of that length."""
    if type(value) is not list or (length is not None and len(value) != length):
        raise CodecError(f"{name} must be a list{'' if length is None else f' of {length} items'}")
    return value


def _lists(
    unpack_list: Function, draw_item: Function, pack: Function, make: type = list,
    max_items: float = MAX_ITEMS, min_items: int = 0,
) -> Kind:  # fmt: skip
    """A kind of lists; `unpack_list` has the length as its last argument, and refuses a list of another one."""

    def unpack(value: object, name: str, length: int | None = None) -> object:
        values = unpack_list(value, name, length)
        if length is None and not min_items <= len(values) <= max_items:
            raise CodecError(f"{name} must {'hold' if values else 'not be empty, but'} at most {max_items} items")
        return values if make is list else make(values)

    def draw(pick: Random, length: int | None = None) -> object:
        return make(draw_item(pick) for _ in range(pick.randrange(min_items, 4) if length is None else length))

    is_plain = make is list and not min_items and max_items >= MAX_ITEMS
    return Kind(unpack_list if is_plain else unpack, draw, pack)


def items(kind: Kind, max_items: int = MAX_ITEMS, make: type = list) -> Kind:
    """Values of a kind, one by one."""
    unpack_item, pack_item = kind.unpack, kind.pack

    def unpack(value: object, name: str, length: int | None = None) -> list[object]:
        return [unpack_item(item, name) for item in list_of(value, name, length)]

    def pack(values: Sequence[object], name: str) -> list[object]:
        return [pack_item(value, name) for value in values]

    return _lists(unpack, kind.draw, as_it_is if pack_item is as_it_is else pack, make, max_items)


def texts(max_length: int = MAX_TEXT_LENGTH, max_items: int = MAX_ITEMS, low: int = 0, make: type = list) -> Kind:
    """Strings of `low` to `max_length` characters."""

    def unpack(value: object, name: str, length: int | None = None) -> list[str]:
        if type(value) is not list or (length is not None and len(value) != length):
            raise CodecError(f"{name} must be a list of strings")
        if value:
            try:  # in C: this runs over every request of every step
                "".join(value)  # refuses other types
                lengths = set(map(len, value))
            except TypeError:
                lengths = {-1}
            if min(lengths) < low or max(lengths) > max_length:
                raise CodecError(f"{name} must hold strings of {low} to {max_length} characters")
        return value

    return _lists(unpack, text(max_length, low).draw, as_it_is, make, max_items)


def counters(max_items: int = MAX_ITEMS) -> Kind:
    """A tuple of whole numbers from 0 on."""

    def unpack(value: object, name: str) -> tuple[int, ...]:
        if type(value) is not list or len(value) > max_items or (value and not are_counters(value)):
            raise CodecError(f"{name} must be a list of at most {max_items} integers in [0, {MAX_INT}]")
        return tuple(value)

    return Kind(unpack, lambda pick: tuple(COUNT.draw(pick) for _ in range(pick.randrange(4))))


def are_counters(values: Sequence[Any]) -> bool:
    """Whether values, of which there are some, are whole numbers from 0 on; in a few passes in C."""
    return set(map(type, values)) == {int} and min(values) >= 0 and max(values) <= MAX_INT


def codes(members: Iterable[Enum]) -> Kind:
    """Members of an enumeration, by their places in it."""
    known = tuple(members)
    member_to_code = {one: code for code, one in enumerate(known)}

    def unpack(value: object, name: str, length: int | None = None) -> list[Enum]:
        if type(value) is not bytes or len(value) != (len(value) if length is None else length):
            raise CodecError(f"{name} must be bytes, {length} where there are as many rows")
        if value and max(value) >= len(known):
            raise CodecError(f"{name} must hold codes below {len(known)}")
        return list(map(known.__getitem__, value))

    def pack(values: Sequence[Enum], name: str) -> bytes:
        return bytes(map(member_to_code.__getitem__, values))

    return _lists(unpack, lambda pick: pick.choice(known), pack)


def _numbers(typecode: str, draw: Function, what: str) -> Callable[..., Kind]:
    size = array(typecode).itemsize

    def pack(values: Iterable[float], name: str) -> bytes:
        try:
            return array(typecode, values).tobytes()
        except (OverflowError, TypeError) as error:
            raise CodecError(f"{name} must hold {what}") from error

    def unpack(value: object, name: str, length: int | None = None) -> list[object]:
        if type(value) is not bytes or len(value) % size:
            raise CodecError(f"{name} must be packed numbers of {size} bytes")
        if length is not None and len(value) != length * size:  # before there is a list of them
            raise CodecError(f"{name} must hold {length} numbers")
        values = memoryview(value).cast(typecode).tolist()  # type: ignore[call-overload]  # one of two formats
        if typecode == "d" and any(map(math.isnan, values)):  # it compares false with every limit
            raise CodecError(f"{name} must not hold NaN")
        return values  # type: ignore[no-any-return]  # numbers

    def make_kind(max_items: float = math.inf, min_items: int = 0, make: type = list) -> Kind:
        return _lists(unpack, draw, pack, make, max_items, min_items)

    return make_kind


# In the machine's byte order: both ends are on machines of one kind. Types and ranges hold by construction.
uint32s: Final = _numbers("I", lambda pick: pick.choice((0, 1, 96, 2**32 - 1)), "integers in [0, 2**32)")
floats: Final = _numbers("d", lambda pick: pick.choice((0.0, -1.5, 1e6)), "numbers")
UINT32S: Final = uint32s()
FLOATS: Final = floats()


def lists(kind: Kind, max_items: float = math.inf, make: type = list, outer: type = list) -> Kind:
    """Lists of lists of another kind: lengths, or None where each is 1, then all items."""
    nothing = kind.pack([], "")

    def pack(values: Sequence[Sequence[object]], name: str) -> list[object]:
        if not any(values):  # as in most steps of most requests
            return [bytes(4 * len(values)), nothing]
        flat = list(chain.from_iterable(values))
        has_lengths = len(flat) != len(values) or not all(values)
        return [UINT32S.pack(map(len, values), name) if has_lengths else None, kind.pack(flat, name)]

    def unpack(value: object, name: str, length: int | None = None) -> list[object]:
        if type(value) is not list or len(value) != 2:
            raise CodecError(f"{name} must be lengths and items")
        packed_lengths, packed = value
        if packed_lengths is None:
            ones = kind.unpack(packed, name, length)
            return [[one] for one in ones] if make is list else list(zip(ones))
        if packed == nothing and length is not None and packed_lengths == bytes(4 * length):
            return [make() for _ in range(length)]
        lengths = UINT32S.unpack(packed_lengths, name, length)
        flat = kind.unpack(packed, name, sum(lengths))
        whole = flat if make is list else make(flat)
        return [whole[end - count : end] for count, end in zip(lengths, accumulate(lengths), strict=True)]

    def draw(pick: Random) -> object:
        return make(kind.draw(pick, pick.choice((0, 1, 1, 3))))

    return _lists(unpack, draw, pack, outer, max_items)


def sparse(default: object, column: Kind) -> Kind:
    """A column whose values are mostly `default`: None where all are, else the numbers of the others and these."""

    def pack(values: Sequence[object], name: str) -> object:
        indices = [index for index, value in enumerate(values) if value != default]
        others = [values[index] for index in indices]
        return [UINT32S.pack(indices, name), column.pack(others, name)]

    def unpack(value: object, name: str, length: int) -> object:
        packed_indices, packed_values = list_of(value, name, 2)
        indices = UINT32S.unpack(packed_indices, name)
        unpacked = column.unpack(packed_values, name, len(indices))
        if indices and max(indices) >= length:
            raise CodecError(f"{name} must name rows below {length}")
        values = [default] * length
        for index, item in zip(indices, unpacked, strict=True):
            values[index] = item
        return values

    def draw(pick: Random, length: int) -> list[object]:
        return [default if pick.random() < 0.7 else column.draw(pick, 1)[0] for _ in range(length)]

    return Kind(unpack, draw, pack, default)


def columns(cls: type[tuple[object, ...]], field_to_column: Mapping[str, Kind], make: type = list) -> Kind:
    """Named tuples, or pairs, by columns in the order of their fields; the first one tells how many."""
    names = tuple(field_to_column)
    if getattr(cls, "_fields", names) != names:
        raise TypeError(f"{cls.__name__} has other fields than {', '.join(names)}")
    kinds = field_to_column.values()
    packs = [(name, kind.pack, kind.default) for name, kind in field_to_column.items()]
    (_, _, unpack_first, _), *unpacks = [
        (index, name, kind.unpack, kind.default) for index, (name, kind) in enumerate(field_to_column.items())
    ]

    def pack(rows: Sequence[object], name: str) -> list[object]:
        packed: list[object] = []
        if not rows:
            return packed
        for (field, one, default), column in zip(packs, zip(*rows, strict=True), strict=True):
            if default is NO_DEFAULT:
                packed.append(column if one is as_it_is else one(column, field))
            else:
                packed.append(None if column.count(default) == len(rows) else one(column, field))
        return packed

    def unpack(value: object, name: str, length: int | None = None) -> object:
        if not value and type(value) is list and not length:
            return make()
        if type(value) is not list or len(value) != len(names):
            raise CodecError(f"{name} must be {len(names)} columns")
        first = unpack_first(value[0], names[0], length)
        count = len(first)
        rest = [
            repeat(none, count) if value[index] is None and none is not NO_DEFAULT else one(value[index], field, count)
            for index, field, one, none in unpacks
        ]
        return make(map(tuple.__new__, repeat(cls), zip(first, *rest, strict=True)))

    def draw(pick: Random) -> object:
        return tuple.__new__(cls, [kind.draw(pick, 1)[0] for kind in kinds])

    return replace(_lists(unpack, draw, pack, make), unpack=unpack)
