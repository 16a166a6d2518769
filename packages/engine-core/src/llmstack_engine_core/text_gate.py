"""Texts of tokens, read beside the steps for requests that sample by them."""

from __future__ import annotations

import logging
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Final

from llmstack_engine_core.protocols import TextRunner
from llmstack_engine_core.stages import Ready, Stage
from llmstack_types import EngineCoreRequest, InvalidRequestError

logger = logging.getLogger(__name__)

UNREADABLE: Final = "The texts of the model's tokens cannot be read; the engine core's log says more."


class TextGate(Stage):
    """Holds requests that sample by the texts of tokens until these are in memory; other requests overtake them.

    They are read with the first such request, in a thread. Where that fails, the requests that wait end with an error,
    and the next one tries again.

    Attributes:
        waiting: Request id to the request, of those that wait for the texts.
    """

    def __init__(self, runner: TextRunner) -> None:
        self.waiting: dict[str, EngineCoreRequest] = {}
        self._runner = runner
        self._reading: Future[None] | None = None
        self._is_held = False
        self._thread = ThreadPoolExecutor(1, "read-texts")

    def hold(self, request: EngineCoreRequest) -> bool:
        """Begins to read the texts, if nothing has; True while they are not there."""
        if self._reading is None:
            self._runner.announce_token_texts()
            self._reading = self._thread.submit(self._runner.read_token_texts)
        elif self._is_held:
            return False
        self.waiting[request.request_id] = request
        return True

    def take_ready(self, wait_s: float) -> list[Ready]:
        """The requests that wait, once the texts are there or cannot be read; waits at most `wait_s` for that."""
        if self._reading is None or not self.waiting:
            return []
        if wait_s:
            wait([self._reading], wait_s)
        if not self._reading.done():
            return []
        error, refusal = self._reading.exception() or self._hold(), None
        if error is not None:
            logger.error("the texts of tokens cannot be read", exc_info=error)
            self._reading, refusal = None, InvalidRequestError(UNREADABLE)
        waiting, self.waiting = self.waiting, {}
        return [(request, refusal) for request in waiting.values()]

    def _hold(self) -> ValueError | None:
        """Lets all ranks hold the texts of tokens; returns the error if they cannot."""
        try:
            self._runner.hold_token_texts()
        except ValueError as error:
            return error
        self._is_held = True
        return None

    def forget(self, request_ids: Collection[str]) -> None:
        """Forgets requests that have ended."""
        for request_id in request_ids:
            self.waiting.pop(request_id, None)

    def shutdown(self) -> None:
        """Ends the thread once it has read its text."""
        self._thread.shutdown(wait=False, cancel_futures=True)
