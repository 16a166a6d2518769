"""Timing of steps by phase, for logs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

PHASES = ("prepare", "forward", "sample", "wait")


@dataclass(slots=True)
class StepTiming:
    """Sums over all steps since construction. On a GPU a phase is the time to launch it, not to run it.

    Attributes:
        phases_s: Phase (`prepare`, `forward`, `sample`, `wait`) to seconds. `wait` is the time that the host waited for
            a step's tokens; the other phases are the host's work.
    """

    num_steps: int = 0
    num_tokens: int = 0
    phases_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))

    @property
    def host_s(self) -> float:
        """Time of the host's work, without waiting."""
        return sum(self.phases_s.values()) - self.phases_s["wait"]

    def reset(self) -> None:
        self.num_steps = self.num_tokens = 0
        self.phases_s.update(dict.fromkeys(PHASES, 0.0))

    def note_step(self, num_tokens: int) -> None:
        """Counts one step and its tokens."""
        self.num_steps += 1
        self.num_tokens += num_tokens

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds the time of the block to a phase."""
        start_s = time.perf_counter()
        try:
            yield
        finally:
            self.phases_s[name] += time.perf_counter() - start_s
