"""OpenMP's threads, in a process that computes steps."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

SHORT_SPINS: Final[Mapping[str, str]] = {"GOMP_SPINCOUNT": "1000"}
"""Environment of such a process. OpenMP's threads would spin for milliseconds after each operation, on cores that the
threads of kernels and of other processes need."""
_CHOICES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


@contextmanager
def short_spins() -> Iterator[None]:
    """Lets the OpenMP that the `with` block loads read `SHORT_SPINS`, unless the environment has its own choice.

    The environment is as before afterwards. Where PyTorch is loaded already, nothing changes.
    """
    if any(name in os.environ for name in _CHOICES):
        yield
        return
    os.environ.update(SHORT_SPINS)
    try:
        yield
    finally:
        for name in SHORT_SPINS:
            os.environ.pop(name, None)
