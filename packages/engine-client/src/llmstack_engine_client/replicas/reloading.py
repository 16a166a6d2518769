"""Client that exchanges its engine core for another one while requests run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Final, cast
from weakref import WeakKeyDictionary

from llmstack_engine_client.replicas.exchangeable import (
    LOAD_POLL_S,
    Exchangeable,
    ReplicasClient,
    check_move,
    load_adapters,
)
from llmstack_engine_core.config import EngineConfig
from llmstack_types import (
    Control,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineDeadError,
    EngineLostError,
    EngineReady,
    EngineStartError,
    FinishReason,
    InvalidRequestError,
    LLMStackError,
    Operation,
)
from llmstack_types.control import ArgumentTs, ResultT

# How long requests may finish while new ones wait.
MAX_DRAIN_S: Final = 600.0

StartCores = Callable[[EngineConfig, Sequence[str]], Exchangeable]
"""Starts engine cores, or attaches to those at the addresses, and returns without waiting for them."""


class ReloadingClient:
    """A client over the engine core that takes requests, and one before it that still finishes its own.

    A reload has two calls. `prepare` starts the next engine core beside the one that serves; where that fails, nothing
    has changed. `switch` sends all new requests there, at once. Both engine cores are replaced after a crash, each by
    one with its own weights. Where there is no room for two, `exchange` lets new requests wait meanwhile.
    """

    def __init__(self, config: EngineConfig, start: StartCores, addresses: Sequence[str] = ()) -> None:
        """Starts the first engine cores.

        `addresses`: Of engine cores that another program runs; none are started here then.

        Raises:
            EngineStartError: A process cannot be started.
        """
        self._start = start
        self._config = config
        self._current = start(config, addresses)
        self._ready: WeakKeyDictionary[Exchangeable, EngineReady] = WeakKeyDictionary()
        self._next_config = config
        self._held: dict[str, EngineCoreRequest] | None = None  # new requests of an exchange
        self._is_between = False  # one engine core has ended, and the next one is not ready
        self._own_outputs: list[EngineCoreOutput] = []
        self._old: Exchangeable | None = None
        self._next: Exchangeable | None = None
        self._ending: asyncio.Task[None] | None = None
        self._num_past_restarts = self._num_past_unmoved = 0
        self._moved: set[str] = set()  # what the old one still says of these is computed again
        self._has_news = asyncio.Event()
        self._is_listening = False
        self._is_shut_down = False

    @property
    def is_dead(self) -> bool:
        """True once there will be no engine core for new requests."""
        return self._current.is_dead and not self._is_between

    @property
    def is_recovering(self) -> bool:
        """True while new requests wait for an engine core."""
        return self._held is not None or self._current.is_recovering

    @property
    def num_restarts(self) -> int:
        """The number of engine cores that were replaced after a crash."""
        return self._num_past_restarts + sum(client.num_restarts for client in self._clients())

    @property
    def num_unmoved_requests(self) -> int:
        """Requests of a lost replica that had to wait, since no other one computes the same bits."""
        return self._num_past_unmoved + sum(client.num_unmoved_requests for client in self._clients())

    @property
    def engines(self) -> list[EngineReady]:
        """The `EngineReady` of the engine core that takes requests."""
        return self._current.engines

    @property
    def sleep_level(self) -> int:
        """0 while the engine core that takes requests is awake."""
        return self._current.sleep_level

    @property
    def num_requests(self) -> int:
        """Requests in flight, in all engine cores."""
        return len(self._held or ()) + sum(client.num_requests for client in self._clients())

    @property
    def num_finishing(self) -> int:
        """Requests that finish in the engine core before this one."""
        return 0 if self._old is None else self._old.num_requests

    @property
    def is_exchanging(self) -> bool:
        """True while new requests wait for the next engine core."""
        return self._held is not None

    @property
    def is_reloading(self) -> bool:
        """True while there are two engine cores, or one is exchanged: another one is not started then."""
        return self._held is not None or self._next is not None or self._old is not None or self._ending is not None

    async def wait_until_ready(self) -> EngineReady:
        """Waits for the first engine core.

        Raises:
            EngineStartError: It could not start; the text says why.
        """
        client = self._current
        self._ready[client] = ready = await client.wait_until_ready()
        return ready

    async def wait_for_end(self) -> None:
        """Waits for the end of an engine core whose requests have ended; it takes its grace period at most."""
        if self._ending is not None:
            await asyncio.wait([self._ending])

    async def prepare(
        self,
        config: EngineConfig,
        adapters: Callable[[], Sequence[tuple[str, str]]],
        addresses: Sequence[str] = (),
    ) -> EngineReady:
        """Starts the next engine core, which gets no request before `switch`.

        `adapters`: The identities and paths of those that it has to have.
        `addresses`: The addresses of engine cores that another program has started.

        Raises:
            EngineStartError: It could not start, there are two already, or the client is shut down meanwhile.
            EngineDeadError: It died.
        """
        if self.is_reloading or self._is_shut_down:
            raise EngineStartError("another engine core is being started, or has not ended yet")
        return await self._prepare(config, adapters, addresses)

    async def _prepare(
        self, config: EngineConfig, adapters: Callable[[], Sequence[tuple[str, str]]], addresses: Sequence[str] = ()
    ) -> EngineReady:
        if self._is_shut_down:
            raise EngineStartError("the client has been shut down")
        client = self._next = self._start(config, addresses)
        self._next_config = config
        try:
            self._ready[client] = ready = await client.wait_until_ready()
            await load_adapters(client, adapters)
        except BaseException:  # also a cancellation
            self._next = None
            await client.shutdown()
            raise
        return ready

    async def exchange(
        self,
        config: EngineConfig,
        adapters: Callable[[], Sequence[tuple[str, str]]],
        check: Callable[[EngineReady], None],
    ) -> EngineReady:
        """Starts another engine core where the one that serves has been, once its requests have ended.

        New requests wait meanwhile. Where the other one does not start, one with the weights of before does.

        `check`: Raises an `LLMStackError` where the other engine core cannot be used.

        Raises:
            LLMStackError: The engine core is the one of before, or serves its weights.
        """
        if self.is_reloading or self._is_shut_down:
            raise EngineStartError("another engine core is being started, or has not ended yet")
        self._held = {}
        try:
            await self._drain()
            self._is_between = True
            await self._current.shutdown()
            try:
                ready = await self._prepare(config, adapters)
                check(ready)
            except LLMStackError:
                await self.drop()
                await self._prepare(self._config, lambda: ())
                raise
            return ready
        finally:
            await self._go_on()

    async def _drain(self) -> None:
        deadline_s = monotonic() + MAX_DRAIN_S
        while self._current.num_requests:
            if self._current.is_dead:
                raise EngineDeadError("the engine core is gone")
            if monotonic() > deadline_s:
                raise EngineStartError(f"requests still run after {MAX_DRAIN_S:g} s")
            await asyncio.sleep(LOAD_POLL_S)

    async def _go_on(self) -> None:
        """Sends what has waited to the engine core that there is now."""
        if self._next is not None:
            self._note_past(self._current)
            self._current, self._next, self._config = self._next, None, self._next_config
            if self._is_listening:
                self._current.listen(self._has_news.set)
        self._is_between = False
        self._has_news.set()
        while self._held:  # one that is aborted meanwhile is not sent
            request = self._held.pop(next(iter(self._held)))
            try:
                await self._current.add_request(request)
            except (EngineDeadError, ValueError):
                failed = EngineCoreOutput(
                    request.request_id, [], finish_reason=FinishReason.ERROR, error=EngineLostError.TEXT
                )
                self._own_outputs.append(failed)
                self._has_news.set()
        self._held = None

    async def drop(self) -> None:
        """Ends the engine core that `prepare` has started."""
        client, self._next = self._next, None
        if client is not None:
            await client.shutdown()

    def note_end(self, index: int, reason: str) -> None:
        """As `BalancedClient.note_end`, of the engine cores that take requests."""
        if isinstance(self._current, ReplicasClient):
            self._current.note_end(index, reason)

    def note_death(self, pid: int, how: str, *, is_outside: bool) -> None:
        """As `RecoveringClient.note_death`, of whichever it was."""
        for client in self._clients():
            client.note_death(pid, how, is_outside=is_outside)

    def check_move(self) -> None:
        """Checks that running requests may go on in the prepared engine core.

        Raises:
            EngineStartError: They may not, or there is none.
        """
        if self._next is None:
            raise EngineStartError("the next engine core has ended")
        check_move(self._current, self._next)

    def switch(self, *, moves: bool = False) -> int:
        """Sends new requests to the prepared engine core; the one before it finishes its own and ends then.

        `moves`: Its requests go on in the prepared one instead, each after the last token that its user has got.

        Returns the number of requests that moved.

        Raises:
            EngineStartError: There is no prepared engine core, or it has died, or requests cannot move to it.
        """
        client = self._next
        if client is None or client.is_dead:
            raise EngineStartError("the next engine core has ended")
        old = self._current
        if moves:
            check_move(old, client)
        self._next, self._current, self._old, self._config = None, client, old, self._next_config
        self._moved.clear()
        if moves:
            requests = old.give_away()
            self._moved.update(request.request_id for request in requests)
            client.receive(requests)
        old.retire()
        if self._is_listening:
            client.listen(self._has_news.set)
        self._has_news.set()
        self._end_if_idle()
        return len(self._moved)

    async def add_request(self, request: EngineCoreRequest) -> None:
        """Sends one request; a fork follows its parent.

        Raises:
            EngineDeadError: There will be no engine core for it.
            InvalidRequestError: The id is in use.
        """
        old = self._old
        if old is not None and request.fork_of and old.has_request(request.fork_of):
            await old.add_request(request)
            return
        if self._held is not None and not (request.fork_of and self._current.has_request(request.fork_of)):
            if request.request_id in self._held or self._current.has_request(request.request_id):
                raise InvalidRequestError("The request id is in use.", param="request_id", code="duplicate_request_id")
            self._held[request.request_id] = request
            return
        await self._current.add_request(request)

    async def abort_requests(self, request_ids: Sequence[str]) -> None:
        """Ends requests; unknown ones are ignored."""
        if self._held is not None:
            for request_id in request_ids:
                self._held.pop(request_id, None)
        for client in self._clients():
            await client.abort_requests(request_ids)
        self._end_if_idle()

    async def get_outputs(self) -> EngineCoreOutputs:
        """Waits for the outputs of the next step of any engine core.

        Raises:
            EngineDeadError: There will be no engine core for new requests.
        """
        if not self._is_listening:
            self._is_listening = True
            self._current.listen(self._has_news.set)
        while True:
            self._has_news.clear()
            if self._own_outputs:
                own, self._own_outputs = self._own_outputs, []
                return EngineCoreOutputs(own)
            outputs = self._take_old()
            if outputs is None and not self._is_between:
                outputs = self._current.get_outputs_nowait()
                if outputs is not None:
                    return outputs._replace(engine=self._ready.get(self._current))
            if outputs is not None:
                return outputs
            await self._has_news.wait()

    async def call(
        self, operation: Operation[ResultT, *ArgumentTs], *arguments: *ArgumentTs, engine_index: int | None = None
    ) -> ResultT:
        """Asks the engine core that takes requests; it does not sleep while there is another one.

        Raises:
            EngineDeadError: There will be none.
        """
        if operation == Control.SLEEP and self.is_reloading:
            return cast("ResultT", False)
        while self._is_between:  # noqa: ASYNC110 - as long as a start
            await asyncio.sleep(LOAD_POLL_S)
        return await self._current.call(operation, *arguments, engine_index=engine_index)

    async def shutdown(self) -> None:
        """Stops all engine cores. Idempotent."""
        self._is_shut_down = True
        clients = [client for client in (self._next, *self._clients()) if client is not None]
        await asyncio.gather(*(client.shutdown() for client in clients))
        if self._ending is not None:
            await self._ending

    def _note_past(self, gone: Exchangeable) -> None:
        self._num_past_restarts += gone.num_restarts
        self._num_past_unmoved += gone.num_unmoved_requests

    def _clients(self) -> list[Exchangeable]:
        return [self._current] if self._old is None else [self._old, self._current]

    def _take_old(self) -> EngineCoreOutputs | None:
        """Outputs of the engine core that finishes; its statistics would replace those of the current one."""
        while self._old is not None:
            try:
                outputs = self._old.get_outputs_nowait()
            except EngineDeadError:
                outputs = None
            if outputs is None:
                self._end_if_idle()
                return None
            kept = [output for output in outputs.outputs if output.request_id not in self._moved]
            if kept:
                return outputs._replace(outputs=kept, scheduler_stats=None, engine=self._ready.get(self._old))
        return None

    def _end_if_idle(self) -> None:
        """Ends the engine core before this one once no request is in it, and its user has all of its outputs."""
        old = self._old
        if old is None or old.num_requests or old.has_own_outputs:
            return
        self._old = None
        self._note_past(old)
        self._ending = asyncio.get_running_loop().create_task(self._end(old))

    async def _end(self, old: Exchangeable) -> None:
        try:
            await old.shutdown()
        finally:
            self._ending = None
