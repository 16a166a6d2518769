"""Client that replaces an engine core that crashes, and resumes its requests."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from llmstack_engine_client.clients.async_client import AsyncClient
from llmstack_engine_client.clients.async_mp import AsyncMPClient
from llmstack_engine_client.processes.restarts import MAX_SEARCH_RESTARTS, RestartLimits
from llmstack_engine_client.processes.spare import Spares
from llmstack_engine_client.recovery.resuming import ResumingClient
from llmstack_engine_client.recovery.suspects import AfterCrash
from llmstack_engine_client.recovery.updated_weights import UpdatedWeights
from llmstack_engine_core.messages.protocol import ENGINE_STOPPED, CacheUpdate
from llmstack_types import (
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineDeadError,
    EngineLostError,
    EngineReady,
    EngineStartError,
    InvalidRequestError,
    Operation,
    QuarantinedError,
)
from llmstack_types.control import ArgumentTs, ResultT

logger = logging.getLogger(__name__)

# Clients that share an engine core search one after the other, and begin so long after each other.
TURN_S: Final = 2.0
# A supervisor says at once how an engine core has ended. Clients of another program's engine cores get no such message.
CAUSE_WAIT_S: Final = 1.0
_MAX_CAUSES: Final = 16


class RecoveringClient(ResumingClient):
    """Satisfies what an `AsyncClient` offers. Its user sees a pause where the engine core died.

    A resumed request carries the tokens it has already, and the next ones are drawn by its seed and their places. Where
    the numeric contract holds, its text is the same as without a crash. A request that crashes engine cores is found
    (`Suspects`) and ends with the text of `QuarantinedError`.

    Attributes:
        num_restarts: So far.
        num_unmoved_requests: Always 0: without replicas no request waits for another one.
        num_finishing, is_exchanging: A `ReloadingClient` exchanges engine cores, and this one does not.
    """

    num_unmoved_requests = num_finishing = 0
    is_exchanging = False

    def __init__(
        self,
        start: Callable[[], AsyncClient],
        max_restarts: int,
        shared_turn: int | None = None,
        spares: Spares | None = None,
    ) -> None:
        """Starts the first engine core, or attaches to it.

        Args:
            start: Starts one, or attaches to the one that its supervisor starts.
            shared_turn: The place of this client among those that share the engine core; None for one that does not.
            spares: Engine cores in reserve, which end with this client.
            max_restarts: Within a minute; after more of them it is dead. Those that narrow a search are counted apart.

        Raises:
            EngineStartError: A process cannot be started.
        """
        super().__init__(start(), is_shared=shared_turn is not None)
        self.num_restarts = 0
        self._start = start
        self._is_shared, self._turn = shared_turn is not None, shared_turn or 0
        self._spares = spares
        # The searches of other clients end engine cores too.
        self._limits = RestartLimits(max_restarts + MAX_SEARCH_RESTARTS if self._is_shared else max_restarts)
        self._was_ready, self._contract_id, self._is_other_model = False, "", False
        self._weights = UpdatedWeights()
        self._death: str | None = None
        self._is_listening = False
        self._pid_to_cause: dict[int, tuple[str, bool]] = {}
        self._learns_causes, self._has_cause = self._is_shared, asyncio.Event()

    @property
    def is_dead(self) -> bool:
        """True once there will be no other engine core."""
        return self._death is not None

    @property
    def is_recovering(self) -> bool:
        """True from the death of an engine core until another one is ready."""
        return self._recovery is not None and self._death is None

    @property
    def is_available(self) -> bool:
        """True while there is an engine core that computes whatever it is sent."""
        return self._was_ready and self._recovery is None and self._death is None and not self._suspects.is_searching

    @property
    def contract_id(self) -> str:
        """The numeric contract id of the engine core, the last one that was ready; empty before."""
        return self._weights.contract_id or self._contract_id

    @property
    def pid(self) -> int:
        """The process id of the engine core that was ready last."""
        return self._client.pid if isinstance(self._client, AsyncMPClient) else self.engines[0].pid

    @property
    def sleep_level(self) -> int:
        """0 while the engine core is awake; a new one is."""
        return self._client.sleep_level

    async def wait_until_ready(self) -> EngineReady:
        """Waits for the first engine core; one that cannot start is not tried again.

        Raises:
            EngineStartError: It could not start; the text says why.
        """
        ready = await self._client.wait_until_ready()
        self._was_ready = True
        self._contract_id = ready.numeric_contract_id
        return ready

    async def add_request(self, request: EngineCoreRequest) -> None:
        """Sends one request, now or when there is an engine core for it.

        Raises:
            EngineDeadError: There will be none.
            InvalidRequestError: The id is in use.
            CodecError: A value is outside what the protocol can carry.
        """
        if self._death is not None:
            raise EngineDeadError(self._death)
        if not self._journal.add(request):
            raise InvalidRequestError("The request id is in use.", param="request_id", code="duplicate_request_id")
        try:
            await self._send(request, is_newcomer=True)
        except ValueError:
            self._journal.forget([request.request_id])
            raise

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
            return self._take_own()
        if self._death is not None:
            raise EngineDeadError(self._death)
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
        """Asks the engine core, and if it dies meanwhile, the next one; a change of weights is not tried again.

        Raises:
            EngineDeadError: There will be none.
        """
        lost: ResultT | None = None
        while True:
            if self._death is not None:
                raise EngineDeadError(self._death)
            if self._recovery is not None:
                await asyncio.wait([self._recovery])
                continue
            if lost is not None:
                return lost
            try:
                result = await self._client.call(operation, *arguments)
            except EngineDeadError as error:
                self._recover(str(error))
                lost = self._weights.lost(operation, str(error))
            else:
                self._weights.follow(operation, arguments, result)
                return result

    async def follow_cache(self) -> None:
        """As `AsyncClient.follow_cache`, of the engine core that there is now.

        Raises:
            EngineDeadError: It is gone.
        """
        await self._client.follow_cache()

    def take_cache_updates(self) -> list[CacheUpdate]:
        """The updates of the current engine core's cache."""
        return self._client.take_cache_updates()

    def drop_spares(self) -> None:
        """Ends the engine cores in reserve; after a crash another one is started."""
        if self._spares is not None:
            self._spares.close()

    def note_death(self, pid: int, how: str, *, is_outside: bool) -> None:
        """Takes from its supervisor how a process has ended, and whether that came from outside.

        The process may be any of the server.
        """
        if not self._is_shared:
            return
        self._learns_causes = True
        self._pid_to_cause[pid] = how, is_outside
        while len(self._pid_to_cause) > _MAX_CAUSES:
            del self._pid_to_cause[next(iter(self._pid_to_cause))]
        self._has_cause.set()

    def end(self, reason: str) -> None:
        """Ends the client for good: other engine cores with equal bits go on with its requests."""
        self._give_up(reason)
        if self._recovery is not None:
            self._recovery.cancel()
        elif not self._was_ready:  # ends the wait for it
            self._keep(asyncio.get_running_loop().create_task(self._client.shutdown()))

    def retire(self) -> None:
        """Gives the engine core no further requests. Where it dies for good, its own end with an error each."""
        self.share(lambda _requests, _are_suspects: False)
        self.drop_spares()

    async def shutdown(self) -> None:
        """Stops the engine core, or the attempt to start one. Idempotent."""
        self._give_up("the engine core has been shut down", is_asked=True)
        self.drop_spares()
        if self._recovery is not None and self._recovery is not asyncio.current_task():
            self._recovery.cancel()
            await asyncio.gather(self._recovery, return_exceptions=True)
        await self._client.shutdown()

    def _recover(self, reason: str) -> None:
        """Begins to start another engine core; what the dead one had sent has been taken already."""
        if self._recovery is None and self._death is None:
            if self.num_requests:
                self._note_stats()
            self._recovery = asyncio.get_running_loop().create_task(self._restart(reason))

    async def _restart(self, reason: str) -> None:
        after = AfterCrash([])
        try:
            reason, is_outside = await self._find_cause(reason)
            after = self._note_crash(is_outside=is_outside)
            if not after.is_search:
                self._hand_over(after.resumed, are_suspects=not is_outside)
            await self._replace(reason, after, is_search=after.is_search and not is_outside)
        except EngineDeadError as error:
            self._give_up(str(error))
        finally:
            self._recovery = None
            self._wake()
        if self._death is None:
            await self._resume(after)

    async def _find_cause(self, reason: str) -> tuple[str, bool]:
        """The end of the engine core in words, and whether it came from outside.

        Raises:
            EngineDeadError: The program that runs it has stopped it.
        """
        is_outside = self._client.was_ended_from_outside
        pid = self.engines[0].pid if self.engines else 0
        if self._learns_causes and pid not in self._pid_to_cause:
            try:
                async with asyncio.timeout(CAUSE_WAIT_S):
                    while pid not in self._pid_to_cause:
                        self._has_cause.clear()
                        await self._has_cause.wait()
            except TimeoutError:
                self._learns_causes = False
        if pid in self._pid_to_cause:
            return self._pid_to_cause.pop(pid)
        if self._is_shared and reason == ENGINE_STOPPED:
            raise EngineDeadError(reason)
        return reason, is_outside

    def _note_crash(self, *, is_outside: bool) -> AfterCrash:
        """The consequences of a crash for the requests that the engine core had received."""
        deferred, self._deferred = self._deferred, []
        # The requests of a beam search go on together, or wait together: only the first one counts.
        running, unsent = (
            [one for one in names if one in self._journal and not self._journal.is_follower(one)]
            for names in (self._running, deferred)
        )
        self._running.clear()
        return self._suspects.on_crash(running, unsent, is_outside=is_outside)

    async def _replace(self, reason: str, after: AfterCrash, *, is_search: bool) -> None:
        """Returns when there is another engine core, and this client may send to it.

        Raises:
            EngineDeadError: That was tried too often.
        """
        while True:
            problem = await self._start_another(reason, is_search=is_search)
            if problem is None:
                problem = await self._wait_for_turn(after)
            if problem is None:
                return
            reason, is_search = problem, False

    async def _wait_for_turn(self, after: AfterCrash) -> str | None:
        """Lets the clients before this one search; returns why the engine core has died meanwhile, if it has.

        That says nothing of the requests of this client. After each crash it waits twice as long: others may be slow.
        """
        if not after.is_search or not self._turn:
            return None
        try:
            async with asyncio.timeout(TURN_S * self._turn * 2**after.num_lone_crashes):
                reason = await self._client.wait_until_dead()
        except TimeoutError:
            return None
        return (await self._find_cause(reason))[0]

    async def _start_another(self, reason: str, *, is_search: bool) -> str | None:
        """Why it did not come up; None if it did.

        Raises:
            EngineDeadError: That was tried too often.
        """
        await self._client.shutdown()
        if not self._limits.may_restart(is_search=is_search):
            raise EngineDeadError(f"{reason}; it was restarted too often within a minute")
        logger.error("the engine core died (%s): starting another for %d requests", reason, self.num_requests)
        if not self._is_shared:  # its supervisor starts it, and does so at once
            await asyncio.sleep(self._limits.backoff_s())
        self.num_restarts += 1
        try:
            self._client = self._start()
            self._client.listen(self._wake)
            before, self._contract_id = self.contract_id, await self._weights.restored(self._client)
            self._is_other_model |= before != self._contract_id
        except (EngineStartError, EngineDeadError) as error:
            logger.error("it did not come up: %s", error)
            return str(error)
        return None

    async def _resume(self, after: AfterCrash) -> None:
        if self._is_other_model:
            self._is_other_model = False
            await self._send_held(self._fail_all())
            return
        if after.quarantined is not None:
            await self._send_held(self._fail(after.quarantined, QuarantinedError.KILLS_ENGINES))
        deferred, self._deferred = self._deferred, []
        await self._send_held([*after.resumed, *deferred])
        if not self._suspects.is_searching:
            await self._send_held(self._suspects.release_newcomers())

    def _give_up(self, reason: str, *, is_asked: bool = False) -> None:
        """Gives up the engine core for good; unless the user has asked for that, others take its requests."""
        if self._death is not None:
            return
        self._death = reason
        if self._move is not None and not is_asked:
            if not self._suspects.is_searching:
                self._hand_over(self._journal.request_ids, are_suspects=True)
            for request_id in self._journal.request_ids:
                self._fail(request_id, EngineLostError.TEXT)
        self._wake()
