"""Requests of a client whose engine core may crash: in it, or waiting for another."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from time import monotonic

from llmstack_engine_client.clients.async_client import AsyncClient
from llmstack_engine_client.recovery.journal import Journal
from llmstack_engine_client.recovery.suspects import Suspects
from llmstack_types import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineDeadError,
    EngineLostError,
    EngineReady,
    FinishReason,
    SchedulerStats,
)

logger = logging.getLogger(__name__)

MoveRequests = Callable[[Sequence[EngineCoreRequest], bool], bool]
"""Lets another engine core go on with requests that belong together; False where none can.

The second argument says whether one of them may have crashed an engine core."""


class ResumingClient(ABC):
    """The journal of a client, and which of its requests may be sent; `RecoveringClient` adds the engine cores."""

    def __init__(self, client: AsyncClient, *, is_shared: bool = False) -> None:
        """`client`: The first engine core.

        `is_shared`: Whether other clients use it too.
        """
        self._client = client
        self._journal = Journal()
        self._suspects = Suspects(is_shared=is_shared)
        self._running: dict[str, None] = {}  # in the engine core; a set would forget the order
        self._own_outputs: deque[EngineCoreOutput] = deque()
        self._own_stats: SchedulerStats | None = None
        self._recovery: asyncio.Task[None] | None = None
        self._releases: set[asyncio.Task[None]] = set()
        self._deferred: list[str] = []  # let go while there was no engine core
        self._move: MoveRequests | None = None
        self._has_news = asyncio.Event()
        self._on_news: Callable[[], None] | None = None

    @property
    def engines(self) -> list[EngineReady]:
        """The `EngineReady` of the engine core that was ready last."""
        return self._client.engines

    @abstractmethod
    def _recover(self, reason: str) -> None:
        """Begins to replace the engine core."""

    def _take_own(self) -> EngineCoreOutputs:
        """Outputs that no engine core sent: errors, and statistics of one that is gone."""
        own, self._own_outputs = list(self._own_outputs), deque()
        stats, self._own_stats = self._own_stats, None
        return EngineCoreOutputs(own, monotonic(), stats)

    @property
    def num_requests(self) -> int:
        """The number of requests in flight."""
        return len(self._journal)

    @property
    def has_own_outputs(self) -> bool:
        """Whether errors or statistics that come from no engine core are still to be taken."""
        return bool(self._own_outputs) or self._own_stats is not None

    def has_request(self, request_id: str) -> bool:
        """Whether the request is in flight here."""
        return request_id in self._journal

    def share(self, move: MoveRequests) -> None:
        """Lets the requests of an engine core that died go on in another one that takes them.

        What crashes a second engine core stays with its replacement, which searches for it: no third one crashes.
        """
        self._move = move

    def adopt(self, requests: Sequence[EngineCoreRequest], *, is_suspect: bool) -> None:
        """Goes on with requests that belong together and were in another engine core when it died.

        `is_suspect`: Whether one of them may have crashed it.
        """
        for request in requests:
            self._journal.add(request)
        if is_suspect:
            self._suspects.suspect(requests[0].request_id)
        self._release_soon([requests[0].request_id])

    def give_away(self) -> list[EngineCoreRequest]:
        """The requests in flight as they go on elsewhere; no output of theirs is of use from here on.

        A beam search of which a beam was aborted cannot begin again, and stays.
        """
        given: list[EngineCoreRequest] = []
        for request_id in self._journal.request_ids:
            if request_id not in self._journal:
                continue  # it went with the first request of its beam search
            group = self._journal.group(request_id)
            requests = [request for one in group if (request := self._journal.resumed(one)) is not None]
            if len(requests) == len(group):
                given += requests
                self._journal.forget(group)
        request_ids = [request.request_id for request in given]
        for request_id in request_ids:
            self._running.pop(request_id, None)
        if request_ids:
            self._keep(asyncio.get_running_loop().create_task(self._client.abort_requests(request_ids)))
        return given

    def receive(self, requests: Sequence[EngineCoreRequest]) -> None:
        """Goes on with what another client gave away, which has crashed nothing."""
        for request in requests:
            self._journal.add(request)
        self._release_soon([request.request_id for request in requests])

    async def abort_requests(self, request_ids: Sequence[str]) -> None:
        """Ends requests; no output follows. Does nothing once the engine core is gone."""
        known = self._journal.forget(request_ids)
        running = [request_id for request_id in known if request_id in self._running]
        for request_id in running:
            del self._running[request_id]
        if running and self._recovery is None:
            await self._client.abort_requests(running)
        if self._recovery is not None and not self.num_requests:
            self._note_stats()
        await self._send_held(self._suspects.forget(known))

    async def _send(self, request: EngineCoreRequest, *, is_newcomer: bool = False) -> None:
        if is_newcomer and (self._recovery is not None or self._suspects.is_searching):
            self._suspects.hold(request.request_id)
            return
        if self._recovery is not None:
            self._deferred.append(request.request_id)
            return
        self._running[request.request_id] = None
        try:
            await self._client.add_request(request)
        except EngineDeadError as error:  # it has not received the request, which is no cause of its end
            self._running.pop(request.request_id, None)
            self._deferred.append(request.request_id)
            self._recover(str(error))
        except ValueError:
            self._running.pop(request.request_id, None)
            raise

    def _note(self, outputs: Sequence[EngineCoreOutput]) -> None:
        self._journal.note(outputs)
        for output in outputs:
            if output.finish_reason is not None:
                self._running.pop(output.request_id, None)
        if self._suspects.has_any:
            self._note_suspects(outputs)

    def _note_suspects(self, outputs: Sequence[EngineCoreOutput]) -> None:
        released: list[str] = []
        for output in outputs:
            if output.finish_reason is None:
                released += self._suspects.on_tokens(output.request_id, len(output.new_token_ids))
            else:
                released += self._suspects.forget([output.request_id])
        if released:
            self._release_soon(released)

    def _release_soon(self, request_ids: Sequence[str]) -> None:
        self._keep(asyncio.get_running_loop().create_task(self._send_held(request_ids)))

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)

    def _hand_over(self, request_ids: Sequence[str], *, are_suspects: bool) -> None:
        """Lets other engine cores go on with requests, as far as they take them."""
        for request_id in request_ids:
            if self._move is None or request_id not in self._journal:
                continue
            group = self._journal.group(request_id)
            requests = [request for one in group if (request := self._journal.resumed(one)) is not None]
            if len(requests) == len(group) and self._move(requests, are_suspects):
                self._journal.forget(group)
                self._suspects.forget(group)

    async def _send_held(self, request_ids: Sequence[str]) -> None:
        """Sends requests that were held back, or were in an engine core that is gone."""
        waiting = deque(request_ids)
        while waiting:
            request_id = waiting.popleft()
            if request_id not in self._journal or request_id in self._running:
                continue
            waiting.extendleft(reversed(self._journal.followers(request_id)))
            request = self._journal.resumed(request_id)
            if request is None:
                waiting += self._fail(request_id, EngineLostError.TEXT)
                continue
            try:
                await self._send(request)
            except ValueError:  # with its tokens it has become too large for a message
                waiting += self._fail(request_id, EngineLostError.TEXT)

    def _fail(self, request_id: str, error: str) -> list[str]:
        """Ends a request, and the beam search that it began; returns the requests that waited for it."""
        if request_id not in self._journal:
            return self._suspects.forget([request_id])
        ended = self._journal.forget([request_id, *self._journal.followers(request_id)])
        for one in ended:
            self._own_outputs.append(EngineCoreOutput(one, [], finish_reason=FinishReason.ERROR, error=error))
        if not self.num_requests:
            self._note_stats()
        self._wake()
        return self._suspects.forget(ended)

    def _fail_all(self) -> list[str]:
        """Ends all requests of an engine core whose weights were others; those that came since go on."""
        logger.error("the weights or their computation have changed: %d requests end", self.num_requests)
        newcomers, self._deferred = self._suspects.release_newcomers(), []
        for request_id in self._journal.request_ids:
            if request_id not in newcomers:
                self._fail(request_id, EngineLostError.TEXT)
        return newcomers

    def _note_stats(self) -> None:
        """Replaces the last statistics of the dead engine core: nothing is running, and requests in flight wait."""
        num_blocks = sum(ready.num_blocks for ready in self.engines)
        self._own_stats = SchedulerStats(
            num_waiting=self.num_requests, num_blocks=num_blocks, num_free_blocks=num_blocks
        )
        self._wake()

    def _wake(self) -> None:
        self._has_news.set()
        if self._on_news is not None:
            self._on_news()
