"""Receipt of the start order while its process imports a model runner."""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence
from queue import SimpleQueue

from llmstack_engine_core.plugins import import_touch_ahead, touch_ahead
from llmstack_engine_core.start_order import StartOrder, receive_start_order


class EarlyOrder:
    """A start order that a thread waits for. The runner takes memory for the weights as soon as it is there."""

    def __init__(self, lifeline: socket.socket, runners: Sequence[str]) -> None:
        """`runners`: Those that this process imports meanwhile."""
        self._lifeline, self._runners = lifeline, runners
        self._received: SimpleQueue[StartOrder | BaseException] = SimpleQueue()
        for runner in runners:
            import_touch_ahead(runner)
        threading.Thread(target=self._receive, name="start-order", daemon=True).start()

    def wait(self) -> StartOrder:
        """The order.

        Raises:
            EngineStartError: It is malformed, or the sender has died.
        """
        found = self._received.get()
        if isinstance(found, BaseException):
            raise found
        if found.config.runner not in self._runners:  # which is imported next
            import_touch_ahead(found.config.runner)
            _touch_ahead(found)
        return found

    def _receive(self) -> None:
        try:
            order = receive_start_order(self._lifeline)
        except BaseException as error:  # noqa: BLE001 - the thread that waits raises it
            self._received.put(error)
            return
        self._received.put(order)
        if order.config.runner in self._runners:
            _touch_ahead(order)


def _touch_ahead(order: StartOrder) -> None:
    if not order.is_spare:  # one in reserve is in no hurry
        touch_ahead(order.config.runner, order.config.model)
