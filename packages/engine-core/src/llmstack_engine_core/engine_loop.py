"""The loop around an engine core.

Between two steps it handles messages; after each step it sends the outputs.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence, Set
from typing import Final, TypeVar

from llmstack_engine_core.admission import error_output
from llmstack_engine_core.arriving_media import ArrivingMedia
from llmstack_engine_core.engine_core import EngineCore
from llmstack_engine_core.ipc.link import client_of
from llmstack_engine_core.messages.control import ControlCall, ControlResult
from llmstack_engine_core.messages.protocol import (
    ENGINE_STOPPED,
    AbortRequests,
    ClientMessage,
    EngineFailed,
    EngineMessage,
    FollowCache,
    Goodbye,
    Hello,
    MediaBytes,
    SleepChanged,
    StartFailed,
)
from llmstack_types import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    InvalidRequestError,
    RequestEvent,
)

logger = logging.getLogger(__name__)

Entry = TypeVar("Entry", EngineCoreOutput, RequestEvent)

# A signal may come between the check for it and the wait, so no wait is endless.
IDLE_WAIT_MS: Final = 500
# Clients without outputs receive the load of the engine core at this interval; `BalancedClient` needs it.
STATS_INTERVAL_S: Final = 0.1
MAX_CLIENTS: Final = 256
# Changes of the cache are collected for so long, unless the engine core is about to be idle.
CACHE_UPDATE_INTERVAL_S: Final = 0.02


class EngineLoop(ABC):
    """An engine core and its clients, each known by an identity; single threaded. Messages travel as subclasses say.

    A request belongs to the client that sent it: no other client gets its outputs or can abort it.
    """

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        # Identity to the time of the last statistics; a set would iterate in a different order each time.
        self._clients: dict[bytes, float] = {}
        self._request_id_to_client: dict[str, bytes] = {}
        self._followers: dict[bytes, None] = {}
        self._arriving = ArrivingMedia()
        self._last_cache_update_s = 0.0

    def run(self) -> None:
        """Serves until a client asks for the end. An exception is sent to the clients, then raised."""
        try:
            while not self._core.is_stopping:
                self.run_once()
        except SystemExit:  # the process is asked to end
            self._broadcast(EngineFailed(ENGINE_STOPPED))
            raise
        except Exception as error:  # whatever it was, the clients must learn of it; it is raised again
            self._broadcast(EngineFailed(f"the engine core failed: {type(error).__name__}; its log says more"))
            raise

    def run_once(self) -> None:
        """Handles the messages that have come, then computes one step if there is work."""
        is_busy = self._core.has_unfinished_requests()
        if self._receive(0 if is_busy else IDLE_WAIT_MS):
            is_busy = self._core.has_unfinished_requests()
        if is_busy:
            step = self._core.step()
            if self._followers:
                self._send_cache_update(step.timestamp_s)
            self._send_outputs(step)
        else:
            self._core.work_when_idle()
            if self._followers:
                self._send_cache_update()
            report = self._core.observers.take_shadow_report()
            if report is not None:
                self._broadcast(EngineCoreOutputs([], self._core.now_s(), shadow=report))

    @abstractmethod
    def _receive(self, wait_ms: int) -> bool:
        """Handles the messages that have come, and says whether there were any; waits at most `wait_ms` for one."""

    @abstractmethod
    def _send(self, client: bytes, message: EngineMessage) -> None:
        """Sends one message; drops a client that is gone (`_drop`)."""

    def _handle(self, client: bytes, message: ClientMessage) -> None:
        if isinstance(message, Hello):
            self._welcome(client)
        elif isinstance(message, Goodbye):  # also of a client of the engine core that this one replaces
            self._drop(client)
        elif client not in self._clients:
            logger.warning("refused a message of %s, which has not said hello", client[:64])
            # One that was dropped since it did not read must not wait for answers that never come.
            self._send(client, EngineFailed("the engine core does not know this client, or does not any more"))
        elif isinstance(message, EngineCoreRequest):
            self._add_request(client, message)
        elif isinstance(message, MediaBytes):
            self._arriving.add(client, message)
        elif isinstance(message, FollowCache):
            self._follow_cache(client)
        elif isinstance(message, AbortRequests):
            for request_id in message.request_ids if self._arriving.num_bytes else ():
                self._arriving.drop(client, request_id)
            self._abort(request_id for request_id in message.request_ids if self._is_owner(client, request_id))
        else:
            self._call(client, message)

    def _welcome(self, client: bytes) -> None:
        if client in self._clients:  # it has started again and has lost its earlier requests
            self._drop(client)
        name, epoch = client_of(client)
        for other, (other_name, other_epoch) in [(other, client_of(other)) for other in self._clients]:
            if other_name != name:
                continue
            if other_epoch > epoch:
                self._send(client, StartFailed("a later connection of this client is there already"))
                return
            self._drop(other)  # its requests go on elsewhere, or come again
        if len(self._clients) >= MAX_CLIENTS:
            self._broadcast(EngineCoreOutputs([]))  # drops those that are gone
        if len(self._clients) >= MAX_CLIENTS:
            self._send(client, StartFailed(f"the engine core has {MAX_CLIENTS} clients already"))
            return
        self._clients[client] = 0.0
        self._send(client, self._core.ready)
        if self._core.sleep_level:
            self._send(client, SleepChanged(self._core.sleep_level))

    def _add_request(self, client: bytes, request: EngineCoreRequest) -> None:
        try:
            if request.media:
                request = self._arriving.complete(client, request)
            self._core.add_request(request)
        except InvalidRequestError as error:
            self._refuse(client, request.request_id, error.message)
        else:
            self._request_id_to_client[request.request_id] = client

    def _refuse(self, client: bytes, request_id: str, error: str) -> None:
        if self._is_owner(client, request_id):
            # The client's own earlier request of that id is running, and an error would end that one.
            logger.warning("refused a second request of id %s", request_id[:64])
            return
        self._send(client, EngineCoreOutputs([error_output(request_id, error)]))

    def _is_owner(self, client: bytes, request_id: str) -> bool:
        return self._request_id_to_client.get(request_id) == client

    def _abort(self, request_ids: Iterable[str]) -> None:
        known = [request_id for request_id in request_ids if self._request_id_to_client.pop(request_id, None)]
        self._core.abort_requests(known)

    def _drop(self, client: bytes) -> None:
        """Forgets a client and ends its requests."""
        self._clients.pop(client, None)
        self._followers.pop(client, None)
        self._arriving.drop(client)
        self._abort([request_id for request_id, owner in self._request_id_to_client.items() if owner == client])

    def _call(self, client: bytes, call: ControlCall) -> None:
        sleep_level = self._core.sleep_level
        value = self._core.call(call.operation, *call.arguments)
        if self._core.sleep_level != sleep_level:  # all clients learn it, before the one that asked gets its answer
            self._broadcast(SleepChanged(self._core.sleep_level))
        self._send(client, ControlResult(call.call_id, call.operation, value))

    def _send_outputs(self, step: EngineCoreOutputs) -> None:
        if len(self._clients) == 1:
            (client,) = self._clients
            if step.outputs or step.scheduler_stats is not None or step.shadow is not None:
                self._send(client, step)
        else:
            self._send_shares(step)
        for output in step.outputs:
            if output.finish_reason is not None:
                self._request_id_to_client.pop(output.request_id, None)

    def _send_shares(self, step: EngineCoreOutputs) -> None:
        """Sends each client what concerns it."""
        outputs_of, events_of = self._by_client(step.outputs), self._by_client(step.events)
        concerned = outputs_of.keys() | events_of.keys()
        informed = self._clients_to_inform(step, concerned)
        first = min(self._clients, default=b"")
        for client in [client for client in self._clients if client in informed or client in concerned]:
            stats, phases = (step.scheduler_stats, step.phases) if client in informed else (None, None)
            outputs, events = outputs_of.get(client, []), events_of.get(client, [])
            evictions = step.evictions if client == first else ()
            shadow = step.shadow if client in informed else None
            message = EngineCoreOutputs(
                outputs, step.timestamp_s, stats, events, phases, evictions=evictions, shadow=shadow
            )
            self._send(client, message)

    def _follow_cache(self, client: bytes) -> None:
        news = self._core.observers.cache_news
        if news is None:  # nothing is ever found in this cache
            return
        self._send_cache_update()
        self._followers[client] = None
        self._send(client, news.follow())

    def _send_cache_update(self, now_s: float | None = None) -> None:
        """Tells the followers what has changed in the cache; after a step, only if it is due."""
        news = self._core.observers.cache_news
        is_due = now_s is None or now_s - self._last_cache_update_s >= CACHE_UPDATE_INTERVAL_S
        if news is None or not (is_due or not self._core.has_unfinished_requests()):
            return
        update = news.take()
        if update is None:
            return
        self._last_cache_update_s = now_s or self._last_cache_update_s
        for client in list(self._followers):
            self._send(client, update)

    def _clients_to_inform(self, step: EngineCoreOutputs, concerned: Set[bytes]) -> set[bytes]:
        """The clients that get the step's statistics.

        The first by identity gets all, so that one client sees every step. The others are not woken for each step
        without outputs for them, but receive those of the last one before the engine core is idle.
        """
        if step.scheduler_stats is None or not self._clients:
            return set()
        is_last, first = not self._core.has_unfinished_requests(), min(self._clients)
        informed = {
            client
            for client, last_s in self._clients.items()
            if is_last or client == first or client in concerned or step.timestamp_s - last_s >= STATS_INTERVAL_S
        }
        self._clients.update(dict.fromkeys(informed, step.timestamp_s))
        return informed

    def _by_client(self, entries: Sequence[Entry]) -> dict[bytes, list[Entry]]:
        entries_of: dict[bytes, list[Entry]] = {}
        for entry in entries:
            client = self._request_id_to_client.get(entry.request_id)
            if client is not None:
                entries_of.setdefault(client, []).append(entry)
        return entries_of

    def _broadcast(self, message: EngineMessage) -> None:
        for client in list(self._clients):
            self._send(client, message)
