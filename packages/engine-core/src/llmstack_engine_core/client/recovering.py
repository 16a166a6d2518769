"""Client that replaces an engine core that crashes, and resumes its requests."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Final

from llmstack_engine_core.client.async_mp import AsyncAttachedClient, AsyncMPClient
from llmstack_engine_core.client.journal import Journal, model_identity
from llmstack_engine_core.client.suspects import AfterCrash, Suspects
from llmstack_engine_core.ipc.frames import ENGINE_STOPPED
from llmstack_types import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineDeadError,
    EngineLostError,
    EngineReady,
    EngineStartError,
    FinishReason,
    InvalidRequestError,
    Operation,
    QuarantinedError,
    SchedulerStats,
)
from llmstack_types.control import ArgumentTs, ResultT

logger = logging.getLogger(__name__)

RESTART_WINDOW_S: Final = 60.0
MAX_BACKOFF_S: Final = 8.0
# What finding one among 500 requests takes. An engine core that crashes for another reason causes an endless search.
MAX_SEARCH_RESTARTS: Final = 12
# Clients that share an engine core search one after the other, and begin so long after each other.
TURN_S: Final = 2.0


class RecoveringClient:
    """Satisfies what an `AsyncClient` offers. Its user sees a pause where the engine core died.

    A resumed request carries the tokens it has already, and the next ones are drawn by its seed and their places. Where
    the numeric contract holds, its text is the same as without a crash. A request that crashes engine cores is found
    (`Suspects`) and ends with the text of `QuarantinedError`.

    Attributes:
        num_restarts: So far.
    """

    def __init__(
        self,
        start: Callable[[], AsyncMPClient | AsyncAttachedClient],
        max_restarts: int,
        shared_turn: int | None = None,
    ) -> None:
        """Starts the first engine core, or attaches to it.

        Args:
            start: Starts one, or attaches to the one that its supervisor starts.
            shared_turn: The place of this client among those that share the engine core; None for one that does not.
            max_restarts: Within a minute; after more of them it is dead. Those that narrow a search are counted apart.

        Raises:
            EngineStartError: A process cannot be started.
        """
        self.num_restarts = 0
        self._start = start
        self._shared_turn = shared_turn
        # The searches of other clients end engine cores too.
        self._max_restarts = max_restarts if shared_turn is None else max_restarts + MAX_SEARCH_RESTARTS
        self._client = start()
        self._journal = Journal()
        self._suspects = Suspects()
        self._running: dict[str, None] = {}  # in the engine core; a set would forget the order
        self._own_outputs: deque[EngineCoreOutput] = deque()
        self._own_stats: SchedulerStats | None = None
        self._restart_times_s: deque[float] = deque()
        self._search_times_s: deque[float] = deque()
        self._was_ready = False
        self._identity, self._is_other_model = tuple[object, ...](), False
        self._recovery: asyncio.Task[None] | None = None
        self._releases: set[asyncio.Task[None]] = set()
        self._deferred: list[str] = []  # let go while there was no engine core
        self._death: str | None = None
        self._has_news = asyncio.Event()
        self._on_news: Callable[[], None] | None = None
        self._is_listening = False

    @property
    def is_dead(self) -> bool:
        """True once there will be no other engine core."""
        return self._death is not None

    @property
    def is_recovering(self) -> bool:
        """True from the death of an engine core until another one is ready."""
        return self._recovery is not None and self._death is None

    @property
    def engines(self) -> list[EngineReady]:
        """What the engine core said when it was ready, the last one that was."""
        return self._client.engines

    @property
    def pid(self) -> int:
        """Of the engine core's process, the last one that was ready."""
        return self._client.pid if isinstance(self._client, AsyncMPClient) else self.engines[0].pid

    @property
    def sleep_level(self) -> int:
        """0 while the engine core is awake; a new one is."""
        return self._client.sleep_level

    @property
    def num_requests(self) -> int:
        """The number of requests in flight."""
        return len(self._journal)

    async def wait_until_ready(self) -> EngineReady:
        """Waits for the first engine core; one that cannot start is not tried again.

        Raises:
            EngineStartError: It could not start; the text says why.
        """
        ready = await self._client.wait_until_ready()
        self._was_ready = True
        self._identity = model_identity(ready)
        return ready

    async def add_request(self, request: EngineCoreRequest) -> None:
        """Sends one request, now or when there is an engine core for it.

        Raises:
            EngineDeadError: There will be none.
            InvalidRequestError: The id is in use.
            CodecError: A value is outside what the protocol can carry.
        """
        self._check_alive()
        if not self._journal.add(request):
            raise InvalidRequestError("The request id is in use.", param="request_id", code="duplicate_request_id")
        try:
            await self._send(request, is_newcomer=True)
        except ValueError:
            self._journal.forget([request.request_id])
            raise

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
        await self._let_go(self._suspects.forget(known))

    async def get_outputs(self) -> EngineCoreOutputs:
        """Waits for the outputs of the next step.

        Raises:
            EngineDeadError: There will be none.
        """
        if not self._is_listening:
            self.listen(self._on_news)
        while True:
            self._has_news.clear()
            outputs = self.get_outputs_nowait()
            if outputs is not None:
                return outputs
            await self._has_news.wait()

    def get_outputs_nowait(self) -> EngineCoreOutputs | None:
        """Outputs that have come, or None.

        Raises:
            EngineDeadError: There are none, and there will be none.
        """
        if self._own_outputs or self._own_stats is not None:
            own, self._own_outputs = list(self._own_outputs), deque()
            stats, self._own_stats = self._own_stats, None
            return EngineCoreOutputs(own, monotonic(), stats)
        self._check_alive()
        if self._recovery is not None:
            return None
        try:
            outputs = self._client.get_outputs_nowait()
        except EngineDeadError as error:
            if not self._was_ready:
                raise
            self._recover(str(error))
            return None
        if outputs is not None:
            self._note(outputs.outputs)
        return outputs

    def listen(self, on_news: Callable[[], None] | None) -> None:
        """Calls `on_news` whenever something has come, and when the engine core is gone."""
        self._on_news = on_news
        self._is_listening = True
        self._client.listen(self._wake)

    async def call(
        self, operation: Operation[ResultT, *ArgumentTs], *arguments: *ArgumentTs, engine_index: int | None = None
    ) -> ResultT:
        """Asks the engine core, and if it dies meanwhile, the next one.

        Raises:
            EngineDeadError: There will be none.
        """
        while True:
            self._check_alive()
            if self._recovery is not None:
                await asyncio.wait([self._recovery])
                continue
            try:
                return await self._client.call(operation, *arguments)
            except EngineDeadError as error:
                self._recover(str(error))

    async def shutdown(self) -> None:
        """Stops the engine core, or the attempt to start one. Idempotent."""
        self._give_up("the engine core has been shut down")
        if self._recovery is not None and self._recovery is not asyncio.current_task():
            self._recovery.cancel()
            await asyncio.gather(self._recovery, return_exceptions=True)
        await self._client.shutdown()

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
        except EngineDeadError as error:  # it goes with the others that were in it
            self._recover(str(error))
        except ValueError:
            self._running.pop(request.request_id, None)
            raise

    def _note(self, outputs: Sequence[EngineCoreOutput]) -> None:
        self._journal.note(outputs)
        released: list[str] = []
        has_suspects = self._suspects.has_any
        for output in outputs:
            if not has_suspects:
                if output.finish_reason is not None:
                    self._running.pop(output.request_id, None)
            elif output.finish_reason is None:
                released += self._suspects.on_tokens(output.request_id, len(output.new_token_ids))
            else:
                self._running.pop(output.request_id, None)
                released += self._suspects.forget([output.request_id])
        if released:
            task = asyncio.get_running_loop().create_task(self._let_go(released))
            self._releases.add(task)
            task.add_done_callback(self._releases.discard)

    def _recover(self, reason: str) -> None:
        """Begins to start another engine core; what the dead one had sent has been taken already."""
        if self._shared_turn is not None and reason == ENGINE_STOPPED:
            self._give_up(reason)
        if self._recovery is None and self._death is None:
            if self.num_requests:
                self._note_stats()
            self._recovery = asyncio.get_running_loop().create_task(self._restart(reason))

    async def _restart(self, reason: str) -> None:
        # The requests of a beam search go on together, or wait together: only the first one counts.
        after = self._suspects.on_crash([one for one in self._running if not self._journal.is_follower(one)])
        self._running.clear()
        is_search = after.is_search
        try:
            while not await self._start_another(reason, is_search=is_search):
                is_search = False
            if after.is_search and self._shared_turn:
                await asyncio.sleep(TURN_S * self._shared_turn)
        except EngineDeadError as error:
            self._give_up(str(error))
        finally:
            self._recovery = None
            self._wake()
        if self._death is None:
            await self._resume(after)

    async def _start_another(self, reason: str, *, is_search: bool) -> bool:
        """Whether it came up.

        Raises:
            EngineDeadError: That was tried too often.
        """
        await self._client.shutdown()
        if not self._may_restart(is_search=is_search):
            raise EngineDeadError(f"{reason}; it was restarted too often within a minute")
        logger.error("the engine core died (%s): starting another for %d requests", reason, self.num_requests)
        await asyncio.sleep(self._backoff_s())
        self.num_restarts += 1
        try:
            self._client = self._start()
            self._client.listen(self._wake)
            identity = model_identity(await self._client.wait_until_ready())
            self._is_other_model, self._identity = identity != self._identity, identity
        except (EngineStartError, EngineDeadError) as error:
            logger.error("it did not come up: %s", error)
            return False
        return True

    async def _resume(self, after: AfterCrash) -> None:
        if self._is_other_model:
            await self._let_go(self._fail_all())
            return
        if after.quarantined is not None:
            await self._let_go(self._fail(after.quarantined, QuarantinedError.KILLS_ENGINES))
        deferred, self._deferred = self._deferred, []
        await self._let_go([*after.resumed, *deferred])
        if not self._suspects.is_searching:
            await self._let_go(self._suspects.release_newcomers())

    async def _let_go(self, request_ids: Sequence[str]) -> None:
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
        """Ends a request, and the beam search that it began; returns those that waited for it."""
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

    def _may_restart(self, *, is_search: bool) -> bool:
        now_s = monotonic()
        times_s, limit = (
            (self._search_times_s, MAX_SEARCH_RESTARTS) if is_search else (self._restart_times_s, self._max_restarts)
        )
        while times_s and now_s - times_s[0] > RESTART_WINDOW_S:
            times_s.popleft()
        times_s.append(now_s)
        return len(times_s) <= limit

    def _backoff_s(self) -> float:
        """None before the first restart; then 1, 2, 4, ... seconds."""
        num_restarts = len(self._restart_times_s)
        return 0.0 if num_restarts < 2 else min(MAX_BACKOFF_S, 2.0 ** (num_restarts - 2))

    def _give_up(self, reason: str) -> None:
        if self._death is None:
            self._death = reason
            self._wake()

    def _check_alive(self) -> None:
        if self._death is not None:
            raise EngineDeadError(self._death)

    def _wake(self) -> None:
        self._has_news.set()
        if self._on_news is not None:
            self._on_news()
