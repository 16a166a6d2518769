"""Timing of steps by phase, for logs."""

from __future__ import annotations

import time

PHASES = ("prepare", "forward", "sample", "wait")


class Phase:
    """A part of each step; used as a context manager, it adds the time of the block.

    Attributes:
        seconds: The time so far.
    """

    __slots__ = ("_start_s", "seconds")

    def __init__(self) -> None:
        self.seconds = self._start_s = 0.0

    def __enter__(self) -> None:
        self._start_s = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds += time.perf_counter() - self._start_s


class StepTiming:
    """Sums over all steps since construction. On a GPU a phase is the time to launch it, not to run it.

    Attributes:
        prepare: Updates of rows and inputs of the model.
        forward: The model.
        sample: The choice of tokens.
        wait: The time that the host waited for a step's tokens; the other phases are the host's work.
    """

    def __init__(self) -> None:
        self.num_steps = self.num_tokens = 0
        self.prepare, self.forward, self.sample, self.wait = (Phase() for _ in PHASES)

    @property
    def phases_s(self) -> dict[str, float]:
        """Phase to its seconds since the last reset."""
        return {name: getattr(self, name).seconds for name in PHASES}

    @property
    def host_s(self) -> float:
        """Time of the host's work, without waiting."""
        return self.prepare.seconds + self.forward.seconds + self.sample.seconds

    def reset(self) -> None:
        self.num_steps = self.num_tokens = 0
        for name in PHASES:
            getattr(self, name).seconds = 0.0

    def note_step(self, num_tokens: int) -> None:
        """Counts one step and its tokens."""
        self.num_steps += 1
        self.num_tokens += num_tokens
