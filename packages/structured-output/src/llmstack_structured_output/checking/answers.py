"""Answers about constraints that were compiled or refused before."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import astuple

from llmstack_types import InvalidRequestError, StructuredOutputsParams

MAX_NUM_REMEMBERED = 1024
REFUSAL_S = 300.0
"""How long a refusal is repeated without another attempt."""


def key_of(params: StructuredOutputsParams, tenant: str) -> bytes:
    """A digest of a tenant's constraint in normal form; other tenants cannot notice by the time that it is known."""
    return hashlib.sha256(repr((tenant, astuple(params))).encode()).digest()


class RememberedAnswers:
    """The answers used last, by digest: None for a constraint that compiles, or its error for a while."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._answers: OrderedDict[bytes, tuple[InvalidRequestError | None, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._answers)

    def find(self, key: bytes) -> tuple[InvalidRequestError | None] | None:
        """The answer; None where there is none."""
        found = self._answers.get(key)
        if found is None:
            return None
        error, until_s = found
        if error is not None and self._clock() >= until_s:
            del self._answers[key]
            return None
        self._answers.move_to_end(key)
        return (error,)

    def add(self, key: bytes, error: InvalidRequestError | None) -> None:
        """Remembers an answer, and forgets the one that was not used for longest."""
        self._answers[key] = (error, self._clock() + REFUSAL_S)
        self._answers.move_to_end(key)
        while len(self._answers) > MAX_NUM_REMEMBERED:
            self._answers.popitem(last=False)
