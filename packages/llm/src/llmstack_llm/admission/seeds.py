"""Seeds of the completions of a request."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterator
from contextvars import ContextVar

_MASK_64 = 2**64 - 1
_MASK_63 = 2**63 - 1
_GOLDEN = 0x9E3779B97F4A7C15


_seeds: ContextVar[Iterator[int] | None] = ContextVar("seeds", default=None)


def draw_seed() -> int:
    """A seed from the operating system's randomness, or the next one of `draw_seeds_from`."""
    seeds = _seeds.get()
    return secrets.randbits(63) if seeds is None else next(seeds)


def draw_seeds_from(seed: int) -> None:
    """Makes the seeds of this task repeatable, so that a request that is begun again has the same text."""
    _seeds.set(completion_seed(seed, index) for index in itertools.count())


def completion_seed(seed: int, index: int) -> int:
    """The seed of completion `index`: the first keeps the request's own, so that `n` does not change it.

    The others are outputs of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014)
    started at the seed, cut to 63 bits.
    """
    if index == 0:
        return seed
    mixed = (seed + index * _GOLDEN) & _MASK_64
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return (mixed ^ (mixed >> 31)) & _MASK_63
