"""Numbers of the items of prompts, for exact keys of the prefix cache."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

from llmstack_types import InvalidRequestError, MediaItem, PrefixMedia

MAX_KNOWN: Final = 16_384
"""Items that are remembered: one that is forgotten gets another number, so that nothing of it is found any more."""
_LAST_NUMBER: Final = 2**31 - 1
_UNKNOWN: Final = 0
"""The number of an item that has none: nothing is ever stored under its key."""

Numbered = tuple[tuple[int, MediaItem], ...]
"""The items of a prompt without their memory, each with its number."""
_Name = tuple[str, int, MediaItem]
"""What makes an item the same: the salt of the request, the placeholder of its tokens, and the item at place 0."""


class MediaNumbers:
    """Gives equal items of one scope of the prefix cache the same number, from 1 on; no number is used twice.

    A number is a name for an exact comparison of 32-byte digests, made once. So keys of the prefix cache stay numbers
    of 31 bits: `-1 - n` stands in the place of each token that vectors of item n replace.
    """

    def __init__(self) -> None:
        self._last = 0
        self._name_to_number: dict[_Name, int] = {}  # that used last is the last
        self._number_to_name: dict[int, _Name] = {}

    def number(self, token_ids: Sequence[int], media: PrefixMedia) -> Numbered:
        """The items of a prompt with their numbers; O(items).

        Raises:
            InvalidRequestError: There are no numbers left; nothing has changed.
        """
        if self._last + len(media.items) > _LAST_NUMBER:
            raise InvalidRequestError("The engine core has numbered 2**31 items; start it again.", param="media")
        return tuple(
            (self._number_of(_name(item, token_ids, media)), replace(item, memory=None) if item.memory else item)
            for item in media.items
        )

    def known(self, token_ids: Sequence[int], media: PrefixMedia) -> Numbered:
        """As `number`, but an item that has no number gets none; nothing changes."""
        return tuple((self._name_to_number.get(_name(item, token_ids, media), _UNKNOWN), item) for item in media.items)

    def name_of(self, number: int) -> tuple[bytes, int] | None:
        """The digest and the placeholder of an item; None once it is forgotten."""
        name = self._number_to_name.get(number)
        return None if name is None else (name[2].digest, name[1])

    def _number_of(self, name: _Name) -> int:
        number = self._name_to_number.pop(name, 0)
        if not number:
            number = self._last = self._last + 1
            self._number_to_name[number] = name
        self._name_to_number[name] = number
        if len(self._name_to_number) > MAX_KNOWN:
            oldest = next(iter(self._name_to_number))
            del self._number_to_name[self._name_to_number.pop(oldest)]
        return number

    def state(self) -> list[Any]:
        """All of it as builtins."""
        known = [
            (number, salt, placeholder, item.digest, item.kind, item.num_tokens, item.embed_runs, item.layout,
             item.num_units)
            for (salt, placeholder, item), number in self._name_to_number.items()
        ]  # fmt: skip
        return [self._last, known]

    def restore(self, state: Sequence[Any]) -> None:
        """Puts a new one into a `state`."""
        self._last, known = state
        for number, salt, placeholder, digest, kind, num_tokens, runs, layout, num_units in known:
            runs = tuple((start, length) for start, length in runs)
            name = (salt, placeholder, MediaItem(digest, kind, 0, num_tokens, runs, tuple(layout), num_units))
            self._name_to_number[name], self._number_to_name[number] = number, name


def _name(item: MediaItem, token_ids: Sequence[int], media: PrefixMedia) -> _Name:
    """Whatever the front end says of an item is part of its name: it cannot be found with other facts."""
    return media.cache_salt, token_ids[_first_place(item)], replace(item, offset=0, memory=None)


def _first_place(item: MediaItem) -> int:
    return next(vector_places(item)).start


def media_within(media: PrefixMedia, num_tokens: int) -> PrefixMedia:
    """The items with a vector among so many first tokens."""
    return media._replace(items=tuple(item for item in media.items if _first_place(item) < num_tokens))


def vector_places(item: MediaItem) -> Iterator[range]:
    """The places in the prompt that vectors replace, run by run."""
    for start, length in item.embed_runs or ((0, item.num_tokens),):
        yield range(item.offset + start, item.offset + start + length)


def media_keys(token_ids: Sequence[int], media: Iterable[tuple[int, MediaItem]]) -> list[int]:
    """The keys of tokens in the prefix cache: the ids, and `-1 - n` where vectors of item n stand."""
    keys = list(token_ids)
    for number, item in media:
        for places in vector_places(item):
            keys[places.start : places.stop] = [-1 - number] * len(places)
    del keys[len(token_ids) :]  # of an item that they hold the beginning of
    return keys


def routing_key(digest: bytes) -> int:
    """A key of an item that is the same in all engine cores; for guesses at what one of them has cached, no more."""
    return -1 - (int.from_bytes(digest[:4], "little") & _LAST_NUMBER)


def routing_keys(token_ids: Sequence[int], media: Iterable[MediaItem]) -> Sequence[int]:
    """The keys of a prompt's tokens by which a router looks for its prefix."""
    numbered = [(-1 - routing_key(item.digest), item) for item in media]
    return media_keys(token_ids, numbered) if numbered else token_ids
