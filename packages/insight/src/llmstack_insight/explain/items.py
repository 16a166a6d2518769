"""Sentences on the pictures and other items of a prompt: found, or encoded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from llmstack_insight.explain.history import History
from llmstack_insight.explain.waits import Limits
from llmstack_insight.explain.wording import to_count, to_ms, to_text
from llmstack_types.vocabulary import MediaKind

_NAMES: Final[Mapping[MediaKind, str]] = {
    "image": "picture", "video": "video", "audio": "sound", "embeds": "list of vectors",
    "text": "text",
}  # fmt: skip


def items(history: History, limits: Limits, facts: dict[str, Any]) -> Iterator[str]:
    """Sentences on where the items of a prompt were found, and on the encoder's work for the others."""
    if not history.media or not history.has_beginning:
        return
    num_cached = history.num_cached_tokens
    reached = [(number, item) for number, item in history.media if item.end > num_cached]
    works = {number: history.encoder_work_of(number, item) for number, item in reached}
    encoded = [(number, item) for number, item in reached if works[number]]
    begun = {number: sum(not part.first_layer for _, part in works[number]) for number, _ in encoded}
    steps = {id(record): record for own in works.values() for record, _ in own}
    seconds = sum(map(history.seconds_of, steps.values()))
    num_units = sum(item.num_units * max(1, begun[number]) for number, item in encoded)
    num_vectors, num_again = sum(item.num_vectors for _, item in history.media), _num_again(begun)
    places = {"prefix": len(history.media) - len(reached), "encoder": len(reached) - len(encoded)}
    facts |= {
        "media_items": len(history.media), "media_vectors": num_vectors,
        **{f"media_in_{name}_cache": number for name, number in places.items()},
        "media_encoded": len(encoded), "media_encoded_again": num_again,
        "encoder_units": num_units, "encoder_steps": len(steps), "encoder_ms": to_ms(seconds),
    }  # fmt: skip
    cost = f"encoded in {to_count(len(steps), 'step')} of {to_text(seconds)}, {num_units} units"
    yield f"{_what(history)} {to_count(num_vectors, 'vector')}: {_found(places, len(encoded), cost)}."
    if num_again:
        yield f"The encoder did {num_again} of these again: their vectors had to give way to others."


def _num_again(begun: Mapping[int, int]) -> int:
    return sum(count - 1 for count in begun.values() if count > 1)


def _what(history: History) -> str:
    kinds = {item.kind for _, item in history.media}
    name = _NAMES[kinds.pop()] if len(kinds) == 1 else "item"
    number = len(history.media)
    return f"Its {name} has" if number == 1 else f"Its {to_count(number, name)} have"


def _found(places: Mapping[str, int], num_encoded: int, cost: str) -> str:
    is_one = sum(places.values()) + num_encoded == 1
    parts = [f"the {name} cache held {'it' if is_one else number}" for name, number in places.items() if number]
    if num_encoded:
        parts.append(f"it was {cost}" if is_one else f"{num_encoded} {'was' if num_encoded == 1 else 'were'} {cost}")
    return ", and ".join(parts)
