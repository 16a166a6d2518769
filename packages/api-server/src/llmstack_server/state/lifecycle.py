"""Lifecycle states of a server."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from enum import StrEnum

logger = logging.getLogger(__name__)


class LifecycleState(StrEnum):
    """State of a server between its start and its end.

    Loading Model lasts until the model is found or downloaded, Initializing Engine until the engine core is ready.
    """

    START = "Start"
    LOADING_MODEL = "Loading Model"
    INITIALIZING_ENGINE = "Initializing Engine"
    READY = "Ready"
    DRAINING = "Draining"
    STOPPED = "Stopped"


_NEXT: dict[LifecycleState, frozenset[LifecycleState]] = {
    LifecycleState.START: frozenset({LifecycleState.LOADING_MODEL, LifecycleState.STOPPED}),
    LifecycleState.LOADING_MODEL: frozenset({LifecycleState.INITIALIZING_ENGINE, LifecycleState.STOPPED}),
    LifecycleState.INITIALIZING_ENGINE: frozenset({LifecycleState.READY, LifecycleState.STOPPED}),
    LifecycleState.READY: frozenset({LifecycleState.DRAINING, LifecycleState.STOPPED}),
    LifecycleState.DRAINING: frozenset({LifecycleState.STOPPED}),
    LifecycleState.STOPPED: frozenset(),
}


class LifecycleError(RuntimeError):
    """A transition that the state machine does not allow."""


class Lifecycle:
    """The state of one server; it only moves forward.

    Attributes:
        is_ready: True while new requests are accepted.
        waits_for_others: Whether another API process does not accept requests yet. This one accepts them already.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._state = LifecycleState.START
        self.is_ready = False
        self.waits_for_others = False
        self.state_to_entered_s: dict[LifecycleState, float] = {LifecycleState.START: clock()}

    @property
    def state(self) -> LifecycleState:
        return self._state

    @property
    def reported_state(self) -> LifecycleState:
        """The state of the whole server: Ready once every API process accepts requests."""
        if self._state is LifecycleState.READY and self.waits_for_others:
            return LifecycleState.INITIALIZING_ENGINE
        return self._state

    @property
    def is_stopping(self) -> bool:
        """True once no new request will be accepted."""
        return self._state in (LifecycleState.DRAINING, LifecycleState.STOPPED)

    def advance(self, state: LifecycleState) -> None:
        """Enters `state`; entering STOPPED twice is harmless.

        Raises:
            LifecycleError: `state` does not follow the current one.
        """
        if state is self._state is LifecycleState.STOPPED:
            return
        if state not in _NEXT[self._state]:
            raise LifecycleError(f"{state} cannot follow {self._state}")
        logger.debug("lifecycle: %s -> %s", self._state, state)
        self._state = state
        self.is_ready = state is LifecycleState.READY
        self.state_to_entered_s[state] = self._clock()
