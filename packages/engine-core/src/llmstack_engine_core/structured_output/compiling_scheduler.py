"""Around a scheduler: a constrained request reaches it once its grammar is compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from llmstack_engine_core.protocols import ConstraintBackend, Scheduler
from llmstack_types import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    InvalidRequestError,
    ModelRunnerOutput,
    RequestStatus,
    SchedulerOutput,
    SchedulerStats,
)

NUM_COMPILING_THREADS = 2
# How long a step waits for a grammar when there is nothing else to do; messages are read between two steps.
IDLE_WAIT_S = 0.005
_NO_STEP = -1


class CompilingScheduler:
    """Satisfies `Scheduler` by standing around one. Others overtake a request while its grammar is compiled.

    Compiling runs beside the steps, in threads that do without the interpreter's lock for most of it.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        backend: Callable[[], ConstraintBackend],
        on_status: Callable[[str, RequestStatus], None] | None = None,
    ) -> None:
        """`backend` makes it with its first call, in a thread. `on_status` hears of requests that begin to wait."""
        self._scheduler = scheduler
        self._backend = backend
        self._on_status = on_status
        self._pool: ThreadPoolExecutor | None = None
        self._waiting: dict[str, tuple[EngineCoreRequest, Future[None]]] = {}
        self._refused: list[EngineCoreOutput] = []

    @property
    def num_waiting_for_grammar(self) -> int:
        """Requests whose grammars are being compiled."""
        return len(self._waiting)

    def add_request(self, request: EngineCoreRequest) -> None:
        """Queues a request, or begins to compile its grammar.

        Raises:
            InvalidRequestError: The scheduler refuses it.
        """
        if request.sampling_params.structured_outputs is None:
            self._scheduler.add_request(request)
            return
        self._waiting[request.request_id] = (request, self._compiling(request))
        if self._on_status is not None:
            self._on_status(request.request_id, RequestStatus.WAITING_FOR_GRAMMAR)

    def fork_request(self, parent_id: str, child: EngineCoreRequest) -> int:
        """Adds a request that goes on from where a running one is; the scheduler has its parent."""
        return self._scheduler.fork_request(parent_id, child)

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """Ends requests at once; a grammar being compiled still goes to the cache."""
        aborted = list(request_ids)
        for request_id in aborted:
            self._waiting.pop(request_id, None)
        self._scheduler.abort_requests(aborted)

    def has_unfinished_requests(self) -> bool:
        """True while a step could bring something."""
        return bool(self._waiting or self._refused) or self._scheduler.has_unfinished_requests()

    def schedule(self, now_s: float) -> SchedulerOutput:
        """Chooses the rows of the next step; waits a moment where all there is are grammars being compiled."""
        if self._waiting:
            self._add_compiled()
        if (self._waiting or self._refused) and not self._scheduler.has_unfinished_requests():
            # An empty step of its own: the scheduler's steps, and the log of them, are of requests it has.
            return SchedulerOutput(_NO_STEP)
        return self._scheduler.schedule(now_s)

    def update_from_output(
        self, scheduled: SchedulerOutput, output: ModelRunnerOutput, now_s: float
    ) -> EngineCoreOutputs:
        """Takes over the step's results, and tells of requests that were refused."""
        refused, self._refused = self._refused, []
        if scheduled.step == _NO_STEP:
            return EngineCoreOutputs(refused, now_s, self.stats())
        outputs = self._scheduler.update_from_output(scheduled, output, now_s)
        if not refused:
            return outputs
        return EngineCoreOutputs([*refused, *outputs.outputs], outputs.timestamp_s, outputs.scheduler_stats)

    def stats(self) -> SchedulerStats:
        """The state after the last step."""
        stats = self._scheduler.stats()
        return stats._replace(num_waiting=stats.num_waiting + len(self._waiting)) if self._waiting else stats

    def reset_prefix_cache(self) -> bool:
        """Forgets cached prefixes; False while requests are running."""
        return self._scheduler.reset_prefix_cache()

    def _compiling(self, request: EngineCoreRequest) -> Future[None]:
        parent, future = self._waiting.get(request.fork_of, (None, None))
        if parent is not None and future is not None and _is_alike(parent, request):
            return future  # a fork that is late shares nothing
        if self._pool is None:
            self._pool = ThreadPoolExecutor(NUM_COMPILING_THREADS, "compile-grammar")
        return self._pool.submit(self._compile, request)

    def _compile(self, request: EngineCoreRequest) -> None:
        constraint = request.sampling_params.structured_outputs
        if constraint is not None:
            self._backend().compile(constraint, request.eos_token_ids)

    def _add_compiled(self) -> None:
        if not self._scheduler.has_unfinished_requests():
            wait([future for _, future in self._waiting.values()], IDLE_WAIT_S, FIRST_COMPLETED)
        for request_id, (request, future) in list(self._waiting.items()):
            if future.done():
                del self._waiting[request_id]
                self._add(request, future)

    def _add(self, request: EngineCoreRequest, future: Future[None]) -> None:
        try:
            future.result()
            self._scheduler.add_request(request)
        except InvalidRequestError as error:
            refusal = EngineCoreOutput(request.request_id, [], finish_reason=FinishReason.ERROR, error=error.message)
            self._refused.append(refusal)


def _is_alike(one: EngineCoreRequest, other: EngineCoreRequest) -> bool:
    return one.sampling_params.structured_outputs == other.sampling_params.structured_outputs
