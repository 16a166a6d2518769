"""Start, output loop and end of a front end over its engine cores."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING, Self

from llmstack_llm import request_errors
from llmstack_llm.adapters import AdapterRegistry, OnChange
from llmstack_llm.admission.limits import AdmissionLimits, exceeds_share
from llmstack_llm.admission.rules import check_sleep_level
from llmstack_llm.engine_clients import check_model
from llmstack_llm.input_processor import InputProcessor
from llmstack_llm.loop_guard import LoopGuard
from llmstack_llm.model.config import ModelConfig
from llmstack_llm.output_processor import OutputProcessor
from llmstack_llm.outputs.observers import RequestObserver
from llmstack_llm.outputs.stats import StatLogger, announce_engine, record_all
from llmstack_llm.requests import Adapter
from llmstack_types import (
    Control,
    EngineCoreRequest,
    EngineDeadError,
    EngineReady,
    Operation,
    ServerOverloadedError,
    StepRecording,
)
from llmstack_types.control import ArgumentTs, ResultT

if TYPE_CHECKING:
    from llmstack_llm.protocols import AsyncEngineCoreClient

logger = logging.getLogger(__name__)


class EngineFrontEnd:
    """Engine cores behind one client, on one event loop; an asynchronous context manager.

    Attributes:
        model_config: Facts about the model.
        input_processor: Tokenizes and admits; its `limits` follow the engine core once that is ready.
        output_processor: The requests in flight.
        ready: The message of the engine core when it was ready; None before.
        adapters: LoRA adapters that requests can name.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        client: AsyncEngineCoreClient,
        input_processor: InputProcessor,
        output_processor: OutputProcessor,
        stat_loggers: Sequence[StatLogger],
        max_num_queued_reqs: int | None,
        max_num_queued_tokens: int | None = None,
        adapters: AdapterRegistry | None = None,
    ) -> None:
        self.model_config = model_config
        self.input_processor = input_processor
        self.output_processor = output_processor
        self.adapters = adapters or AdapterRegistry()
        self.ready: EngineReady | None = None
        self._client = client
        self._stat_loggers = list(stat_loggers)
        self._max_num_queued_reqs = max_num_queued_reqs
        self._max_num_queued_tokens = max_num_queued_tokens
        self._starting: asyncio.Task[EngineReady] | None = None
        self._output_loop: asyncio.Task[None] | None = None
        self._background: set[asyncio.Task[None]] = set()
        self._death: EngineDeadError | None = None
        self._is_shut_down = False
        self._loop_guard = LoopGuard()
        self._last_step_s = time.monotonic()

    def add_observer(self, observer: RequestObserver) -> None:
        """Reports every request submitted from now on to the observer."""
        self.output_processor.observers += (observer,)

    async def abort(self, request_ids: str | Sequence[str]) -> None:
        """Ends requests; their streams end with finish reason `abort`. Unknown ids are ignored."""
        ids = [request_ids] if isinstance(request_ids, str) else request_ids
        aborted = self.output_processor.abort_requests(ids)
        if aborted:
            await self._client.abort_requests(aborted)

    @property
    def running_request_ids(self) -> list[str]:
        """The ids of the requests that have not ended, those that pool last."""
        return [*self.output_processor.request_id_to_state, *self.output_processor.pooling.request_id_to_state]

    async def wait_until_ready(self) -> EngineReady:
        """Waits until the engine core can take requests.

        Raises:
            EngineStartError: It could not start; the text says why.
            EngineDeadError: It is gone.
        """
        self._loop_guard.check()
        if self.ready is not None:
            self._check_alive()
            return self.ready
        if self._starting is None:
            self._check_alive()
            self._starting = asyncio.create_task(self._client.wait_until_ready())
        started = await asyncio.shield(self._starting)  # one caller's cancellation is not everyone's
        ready = self.model_config.use.restrict(started)
        if self.ready is None:
            self._set_ready(ready)
        self._check_alive()
        return ready

    @property
    def limits(self) -> AdmissionLimits:
        """The limits of the running model; those of the engine core once it is ready."""
        return self.input_processor.limits

    @property
    def state(self) -> str:
        """`starting`, `ready` or `dead`."""
        if self._death is not None or self._client.is_dead or self._has_failed_to_start():
            return "dead"
        return "starting" if self.ready is None else "ready"

    @property
    def is_ready(self) -> bool:
        """True while requests are taken."""
        return self.state == "ready"

    @property
    def num_requests_in_flight(self) -> int:
        """Requests that have not ended."""
        return self.output_processor.num_unfinished_requests

    async def check_health(self) -> None:
        """Raises EngineDeadError once the engine core is gone."""
        self._check_alive()

    @property
    def is_recovering(self) -> bool:
        """True while another engine core takes the place of one that died; requests wait for it."""
        return self._client.is_recovering

    @property
    def num_restarts(self) -> int:
        """The number of engine cores that were replaced after a crash."""
        return self._client.num_restarts

    @property
    def num_unmoved_requests(self) -> int:
        """Requests of a lost engine core that waited, since the others compute different bits."""
        return self._client.num_unmoved_requests

    @property
    def engines(self) -> Sequence[EngineReady]:
        """The `EngineReady` of each engine core."""
        return self._client.engines

    @property
    def sleep_level(self) -> int:
        """0 while the engine core is awake; requests are refused otherwise."""
        return self._client.sleep_level

    async def current_sleep_level(self) -> int:
        """`sleep_level`, asked for: another front end may have changed it a moment ago."""
        return await self._client.call(Control.SLEEP_LEVEL)

    async def sleep(self, level: int = 1) -> bool:
        """Gives the KV storage back, and with level 2 the weights too; False while requests are running.

        Raises:
            InvalidRequestError: There is no such level.
        """
        return await self._client.call(Control.SLEEP, check_sleep_level(level))

    async def wake_up(self) -> None:
        """Allocates and loads what `sleep` freed.

        Raises:
            EngineDeadError: That failed.
        """
        await self._client.call(Control.WAKE_UP)

    async def control(self, operation: Operation[ResultT, *ArgumentTs], *arguments: *ArgumentTs) -> ResultT:
        """Does an operation that needs nothing else from the front end, in all engine cores."""
        return await self._client.call(operation, *arguments)

    async def reset_prefix_cache(self) -> bool:
        """Forgets cached prefixes; False while requests are running."""
        return await self._client.call(Control.RESET_PREFIX_CACHE)

    def find_stuck_requests(self, timeout_s: float) -> tuple[list[str], bool]:
        """Ids of the requests without progress for so long, and whether that is since the engine core stands still.

        A request that waits for its first place in a step is stuck only where no step ends.
        """
        since_s = time.monotonic() - timeout_s
        is_engine_stuck = self._last_step_s < since_s
        request_ids = self.output_processor.find_stalled(since_s, counts_waiting=is_engine_stuck)
        return request_ids, is_engine_stuck and bool(request_ids)

    async def load_adapter(
        self, name: str, path: str, base_model_name: str | None = None, on_change: OnChange | None = None
    ) -> Adapter:
        """Loads an adapter, which requests can name from then on; one that had the name serves its last requests.

        `on_change`: Awaited before the one that had the name is unloaded.

        Raises:
            InvalidRequestError: It cannot be served; the text says why.
        """
        await self.wait_until_ready()
        self.adapters.check(name, path)
        adapter = await asyncio.to_thread(self.adapters.identify, name, path, base_model_name)
        await self.adapters.wait_until_loaded(adapter, self.load_adapter_files)
        before = self.adapters.add(adapter)
        if on_change is not None:
            await on_change()
        if before is not None:
            await self._client.call(Control.UNLOAD_ADAPTER, before.identity)
        return adapter

    async def unload_adapter(self, name: str, on_change: OnChange | None = None) -> bool:
        """Takes no further requests for an adapter; False if there is none of that name.

        `on_change`: Awaited before it is unloaded.
        """
        adapter = self.adapters.remove(name)
        if adapter is None:
            return False
        if on_change is not None:
            await on_change()
        await self._client.call(Control.UNLOAD_ADAPTER, adapter.identity)
        return True

    async def load_adapter_files(self, identity: str, path: str) -> str:
        """Starts reading an adapter in the engine core, and returns the progress; no name is changed."""
        return await self._client.call(Control.LOAD_ADAPTER, identity, path)

    async def set_adapters(self, wanted: Sequence[Adapter]) -> None:
        """Makes these loaded adapters the ones that requests can name, in place of all others."""
        await self.forget_adapters(self.replace_adapters(wanted))

    def replace_adapters(self, wanted: Sequence[Adapter]) -> list[Adapter]:
        """As `set_adapters`; returns those that nothing names any more, which the engine core still has."""
        names = {adapter.name for adapter in wanted}
        gone = [self.adapters.remove(known.name) for known in self.adapters.adapters if known.name not in names]
        gone += [self.adapters.add(adapter) for adapter in wanted if self.adapters.find(adapter.name) != adapter]
        return [adapter for adapter in gone if adapter is not None]

    async def forget_adapters(self, gone: Sequence[Adapter]) -> None:
        """Lets the engine core forget adapters, each after its last request."""
        for adapter in gone:
            await self._client.call(Control.UNLOAD_ADAPTER, adapter.identity)

    def adapter_use(self) -> tuple[list[str], list[str]]:
        """Names of the adapters of requests that run, and of those that wait; sorted."""
        return self.output_processor.adapter_use()

    async def recent_steps(self, after_step: int = 0, engine_index: int = 0) -> StepRecording:
        """The last steps after number `after_step` and the last events, as far as that engine core keeps them."""
        return await self._client.call(Control.RECENT_STEPS, after_step, engine_index=engine_index)

    async def step_log(self, engine_index: int = 0) -> bytes:
        """The step log of that engine core, for `llmstack replay`; empty where it keeps none in memory."""
        return await self._client.call(Control.STEP_LOG, engine_index=engine_index)

    def check_room(self, num_completions: int, num_prompt_tokens: int, tenant: str = "", param: str = "n") -> None:
        """Checks that so many completions, or prompts to pool, may join the queue; `param` asks for so many.

        Raises:
            InvalidRequestError: No queue has room for so many.
            ServerOverloadedError: The queue is full, or the tenant's share of it is.
        """
        outputs, limit = self.output_processor, self._max_num_queued_reqs
        if limit is not None:
            if num_completions > limit:
                raise request_errors.queue_too_short(param, num_completions, limit)
            num_free = limit - outputs.num_unfinished_completions
            if num_completions > num_free or (
                tenant and exceeds_share(num_completions, num_free, outputs.num_unfinished_of(tenant))
            ):
                raise ServerOverloadedError("too many requests are in flight")
        limit = self._max_num_queued_tokens
        num_waiting = 0 if limit is None else outputs.num_waiting_prompt_tokens()
        # With no request waiting, any length is accepted: otherwise the longest would never run.
        if limit is not None and num_waiting:
            num_free = limit - num_waiting
            if num_prompt_tokens > num_free or (
                tenant and exceeds_share(num_prompt_tokens, num_free, outputs.num_waiting_prompt_tokens(tenant))
            ):
                raise ServerOverloadedError("too many prompt tokens are waiting", reason="max_num_queued_tokens")

    async def shutdown(self) -> None:
        """Ends every stream, the output loop and the engine core. Idempotent."""
        if self._is_shut_down:
            return
        self._loop_guard.check()
        self._is_shut_down = True
        self._die(EngineDeadError("the engine is shut down"))
        tasks = [task for task in (self._output_loop, self._starting, *self._background) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(self.input_processor.constraints.shutdown(), self.input_processor.media.shutdown())
        await self._client.shutdown()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.shutdown()

    async def _send(self, request_ids: Sequence[str], requests: Sequence[EngineCoreRequest]) -> None:
        if self._output_loop is None:
            self._start_output_loop()
        is_sent = False
        try:
            if self._death is not None:  # the client may live on where the output loop has failed
                raise EngineDeadError(str(self._death))
            for request in requests:
                await self._client.add_request(request)
            is_sent = True
        finally:
            if not is_sent:  # cancelled, or the engine core is gone
                self._abort_silently(request_ids)

    def _start_output_loop(self) -> None:
        if self._output_loop is None:
            self._output_loop = asyncio.create_task(self._run_output_loop())

    async def _run_output_loop(self) -> None:
        try:
            while True:
                outputs = await self._client.get_outputs()
                self._last_step_s = time.monotonic()
                if outputs.engine is not None:
                    self.output_processor.note_engine(outputs.outputs, outputs.engine)
                arguments = outputs.outputs, outputs.timestamp_s, outputs.events, outputs.phases
                processed = self.output_processor.process_outputs(*arguments)
                if processed.request_ids_to_abort:
                    await self._client.abort_requests(processed.request_ids_to_abort)
                iteration, stats = processed.iteration_stats, outputs.scheduler_stats
                iteration.block_evictions, iteration.shadow = outputs.evictions, outputs.shadow
                iteration.engine_index = outputs.engine_index
                if stats is not None and stats.encoder is not None:
                    self.output_processor.note_encoder(iteration, stats.encoder)
                record_all(self._stat_loggers, stats, iteration)
        except EngineDeadError as error:
            self._die(error)
        except Exception:  # a bug: waiting streams must end rather than hang
            logger.exception("the output loop failed")
            self._die(EngineDeadError("the output loop failed"))

    def _die(self, error: EngineDeadError) -> None:
        self._death = self._death or error
        self.output_processor.fail_all(error)

    def _check_alive(self) -> None:
        if self._death is not None:
            raise EngineDeadError(str(self._death))
        if self._client.is_dead:
            raise EngineDeadError("the engine core is gone")

    def _set_ready(self, ready: EngineReady) -> None:
        for engine in self._client.engines:
            check_model(self.model_config, engine)
        self.ready = ready
        self.input_processor.set_ready(ready)
        self._spawn(self.input_processor.media.start())
        self._start_output_loop()  # an engine core with other clients sends its figures from here on
        for engine in self._client.engines:
            announce_engine(self._stat_loggers, engine)

    def follow_reload(self, model_config: ModelConfig, started: EngineReady) -> EngineReady:
        """Takes the limits and defaults of the engine core that takes new requests from now on."""
        self.model_config = model_config
        self.ready = model_config.use.restrict(started)
        self.input_processor.set_model(model_config, self.ready, lambda: self.running_request_ids)
        for engine in self._client.engines:
            announce_engine(self._stat_loggers, engine)
        return self.ready

    def _has_failed_to_start(self) -> bool:
        task = self._starting
        return task is not None and task.done() and (task.cancelled() or task.exception() is not None)

    def _abort_silently(self, request_ids: Sequence[str]) -> None:
        """Ends requests whose consumer has left; it may be cancelled, so it cannot wait."""
        aborted = self.output_processor.abort_requests(request_ids, is_silent=True)
        if aborted and not self._is_shut_down:
            self._spawn(self._client.abort_requests(aborted))

    def _spawn(self, coroutine: Coroutine[object, object, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
