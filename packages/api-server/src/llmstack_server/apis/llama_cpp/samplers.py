"""The chain of samplers that a request of llama.cpp's names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from llmstack_llm import request_errors

MAX_SAMPLERS: Final = 64
"""More than there are; one that occurs twice is refused by name."""
_FIELDS: Final[Mapping[str, Mapping[str, object]]] = {
    "penalties": {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0},
    "top_n_sigma": {"top_n_sigma": -1.0},
    "temperature": {"temperature": 1.0},
    "min_p": {"min_p": 0.0},
    "typ_p": {"typical_p": 1.0},
    "top_k": {"top_k": 0},
    "top_p": {"top_p": 1.0},
    "infill": {"infill": False},
}
"""Sampler to its fields and the values with which it does nothing, in the order in which they are applied here."""
_ABSENT: Final = frozenset({"dry", "xtc", "adaptive_p"})
"""Samplers that never do anything here: requests with a value that would are refused."""
_LETTERS: Final[Mapping[str, str]] = {
    "e": "penalties", "s": "top_n_sigma", "t": "temperature", "m": "min_p", "y": "typ_p", "k": "top_k", "p": "top_p",
    "i": "infill", "d": "dry", "x": "xtc", "a": "adaptive_p",
}  # fmt: skip
# Scaled logits keep their order and their distances in standard deviations; a threshold on the ratio to the best token
# and a number of best tokens both keep a beginning of that order. At temperature 0 the best token alone counts.
_COMMUTING: Final = (
    frozenset({"temperature", "top_n_sigma"}), frozenset({"temperature", "top_k"}), frozenset({"min_p", "top_k"}),
)  # fmt: skip
_KEEP_THE_BEST: Final = frozenset({"top_n_sigma", "min_p", "top_k", "top_p"})


def sampler_fields(value: list[str] | str, values: Mapping[str, object]) -> dict[str, object]:
    """The sampling fields that a chain of samplers sets: those of samplers that it does not name are off.

    `values`: Field of `SamplingParams` to its checked value, defaults of the model included.

    Raises:
        InvalidRequestError: A name is unknown or occurs twice, or the order has another effect than the one here.
    """
    chain = _names(value)
    off = {field: value for name, fields in _FIELDS.items() if name not in chain for field, value in fields.items()}
    fields = {**off, "infill": "infill" in chain}
    _check_order([name for name in chain if _does_anything(name, {**values, **fields})], values)
    return fields


def _names(value: list[str] | str) -> list[str]:
    """The names of a list, or of a text with a letter for each."""
    if len(value) > MAX_SAMPLERS:
        raise request_errors.array_too_long("samplers", MAX_SAMPLERS, len(value))
    chain = [_LETTERS.get(letter, letter) for letter in value] if isinstance(value, str) else value
    known = _FIELDS.keys() | _ABSENT
    for index, name in enumerate(chain):
        if name not in known:
            expected = ", ".join((*_FIELDS, *sorted(_ABSENT)))
            raise request_errors.invalid_value("samplers", f"'{request_errors.echo(name)}' is none of {expected}")
        if name in chain[:index]:
            raise request_errors.unsupported_value("samplers", f"'{name}' occurs twice")
    return list(chain)


def _does_anything(name: str, values: Mapping[str, object]) -> bool:
    return any(values.get(field, off) != off for field, off in _FIELDS.get(name, {}).items())


def _check_order(chain: Sequence[str], values: Mapping[str, object]) -> None:
    """Raises InvalidRequestError if two samplers that have an effect are in another order than here, and it counts."""
    places = {name: place for place, name in enumerate(_FIELDS)}
    for index, earlier in enumerate(chain):
        for later in chain[index + 1 :]:
            is_greedy = later == "temperature" and values.get("temperature") == 0.0 and earlier in _KEEP_THE_BEST
            if places[earlier] > places[later] and {later, earlier} not in _COMMUTING and not is_greedy:
                reason = f"'{later}' comes before '{earlier}' here, and the order has an effect with these values"
                raise request_errors.unsupported_value("samplers", reason)
