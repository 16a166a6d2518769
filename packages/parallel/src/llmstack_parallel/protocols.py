"""Protocols between the engine core's rank, its peers, and what connects them."""

from __future__ import annotations

from typing import Protocol

from llmstack_model_runner.layers.sharding import Sharding


class Exchange(Protocol):
    """One rank's means to exchange tensors with the others."""

    def sharding(self, *, is_expert_parallel: bool) -> Sharding:
        """The rank's part of a model."""
        ...

    def set_timeout(self, timeout_s: float) -> None:
        """Limits each later wait for another rank."""
        ...

    def check(self) -> None:
        """Raises if an exchange has failed unnoticed."""
        ...

    def abort(self) -> None:
        """Ends the waits of all ranks; from any thread."""
        ...

    def close(self) -> None:
        """Releases what the exchange holds."""
        ...


class Channel(Protocol):
    """Frames between the engine core's rank and one other."""

    def send(self, frame: bytes) -> None:
        """Sends without waiting for the other side."""
        ...

    def receive(self, timeout_ms: int | None = None) -> bytes | None:
        """The next frame; None if none comes in time. Without a limit it waits in the kernel."""
        ...


class Peers(Protocol):
    """The started ranks, but for the engine core's.

    Attributes:
        epoch: Number of this start, in every frame.
        exchange: That of the engine core's rank.
        channels: By rank.
    """

    epoch: int
    exchange: Exchange
    channels: dict[int, Channel]

    def lost(self) -> str | None:
        """Which rank has ended, and how; None while all run."""
        ...

    def stop(self, *, is_over: bool = True) -> None:
        """Ends all of them. Idempotent.

        `is_over`: For good; otherwise others are about to take their place.
        """
        ...
