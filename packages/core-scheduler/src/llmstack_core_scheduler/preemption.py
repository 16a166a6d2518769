"""Preemption policies: recompute the KV of a request, or swap it to the host."""

from __future__ import annotations

from typing import Protocol


class PreemptionPolicy(Protocol):
    """Chooses between recompute and swap, once per preemption. A pure function of its observations."""

    def prefers_swap(self, num_computed_tokens: int, num_blocks: int) -> bool:
        """Whether to move the request's blocks to the host rather than to compute its tokens again."""
        ...

    def observe(self, num_tokens: int, num_rows: int, num_copied_blocks: int, duration_s: float) -> None:
        """Learns what a step has cost; `num_copied_blocks` went to the host or came from it."""
        ...


class AlwaysRecompute:
    """Recomputes every preempted request."""

    def prefers_swap(self, num_computed_tokens: int, num_blocks: int) -> bool:
        """Returns False for every request."""
        return False

    def observe(self, num_tokens: int, num_rows: int, num_copied_blocks: int, duration_s: float) -> None:
        """Ignores the costs, on which the choice does not depend."""


class AlwaysSwap:
    """Swaps whenever the host has room."""

    def prefers_swap(self, num_computed_tokens: int, num_blocks: int) -> bool:
        """Returns True for every request; a full host recomputes all the same."""
        return True

    def observe(self, num_tokens: int, num_rows: int, num_copied_blocks: int, duration_s: float) -> None:
        """Ignores the costs, on which the choice does not depend."""


class CheapestPreemption:
    """Takes what is expected to cost less, by the times of the steps so far.

    The cost of a token is that of steps made up of prefill mostly, since recompute is prefill; that of a block is what
    steps with copies took beyond their tokens.
    """

    _MIN_TOKENS_PER_ROW = 4

    def __init__(self, token_s: float = 1e-4, block_s: float = 1e-4, smoothing: float = 0.1) -> None:
        """The costs to begin with, and the weight of each new observation, in (0, 1].

        Raises:
            ValueError: A number is out of range; the text names it.
        """
        for name, value in (("token_s", token_s), ("block_s", block_s), ("smoothing", smoothing)):
            if not 0.0 < value < float("inf"):
                raise ValueError(f"{name} must be positive and finite, got {value}")
        if smoothing > 1.0:
            raise ValueError(f"smoothing must be at most 1, got {smoothing}")
        self.token_s = token_s
        self.block_s = block_s
        self._smoothing = smoothing

    def prefers_swap(self, num_computed_tokens: int, num_blocks: int) -> bool:
        """Whether the way out and back is shorter than the way through the model."""
        return 2 * num_blocks * self.block_s < num_computed_tokens * self.token_s

    def observe(self, num_tokens: int, num_rows: int, num_copied_blocks: int, duration_s: float) -> None:
        """Adds the measured times of one step."""
        if num_copied_blocks:
            rest_s = max(duration_s - num_tokens * self.token_s, 0.0)
            self.block_s += self._smoothing * (rest_s / num_copied_blocks - self.block_s)
        elif num_tokens >= self._MIN_TOKENS_PER_ROW * max(num_rows, 1):
            self.token_s += self._smoothing * (max(duration_s, 0.0) / num_tokens - self.token_s)
