"""Where the time of the steps goes: light counters for logs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(slots=True)
class StepTiming:
    """Sums over all steps since construction. On a GPU a phase is the time to launch it, not to run it.

    Attributes:
        phases_s: Phase (`prepare`, `forward`, `sample`) to seconds.
    """

    num_steps: int = 0
    num_tokens: int = 0
    phases_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("prepare", "forward", "sample"), 0.0))

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds the time of the block to a phase."""
        start_s = time.perf_counter()
        try:
            yield
        finally:
            self.phases_s[name] += time.perf_counter() - start_s
