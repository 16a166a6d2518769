"""Constrained requests, from the compilation of their grammars to their last step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from llmstack_engine_core.protocols import ConstraintBackend, PendingOutput
from llmstack_engine_core.stages import Execute, Ready, Stage
from llmstack_engine_core.structured_output.constrained_rows import ConstrainedRows
from llmstack_types import EngineCoreRequest, InvalidRequestError, QuarantinedError, RequestStatus, SchedulerOutput

logger = logging.getLogger(__name__)

NUM_QUICK_THREADS = 2
NUM_SLOW_THREADS = 1
QUICK_S = 0.25
"""Grammars that are expected to take longer wait for each other, and others do not wait for them."""


class GrammarGate(Stage):
    """Compiles grammars beside the steps, in threads that release the interpreter's lock for most of the time.

    Other requests overtake one whose grammar is being compiled. `ConstrainedRows` follows those that run.

    Attributes:
        waiting: Request id to the request and the compilation it waits for.
    """

    def __init__(
        self,
        backend: Callable[[], ConstraintBackend],
        on_status: Callable[[str, RequestStatus], None],
    ) -> None:
        """`backend` makes the backend with its first call, in a thread. `on_status` is called as a request is added."""
        self.waiting: dict[str, tuple[EngineCoreRequest, Future[None]]] = {}
        self._backend = backend
        self._on_status = on_status
        self._rows = ConstrainedRows(backend)
        self._request_ids: set[str] = set()  # waiting or running
        self._quick = ThreadPoolExecutor(NUM_QUICK_THREADS, "compile-grammar")
        self._slow = ThreadPoolExecutor(NUM_SLOW_THREADS, "compile-slow-grammar")

    @property
    def is_in_use(self) -> bool:
        """Whether there are constrained requests, or rows that have not been removed."""
        return bool(self._request_ids or self._rows.num_known_tokens)

    def hold(self, request: EngineCoreRequest) -> bool:
        """Begins to compile the request's grammar; True."""
        self.waiting[request.request_id] = (request, self._compilation(request))
        self._on_status(request.request_id, RequestStatus.WAITING_FOR_GRAMMAR)
        self._request_ids.add(request.request_id)
        return True

    def execute(self, execute: Execute, scheduled: SchedulerOutput, *token_masks: object) -> PendingOutput:
        """Starts a step, with the masks of its constrained rows."""
        return self._rows.execute(execute, scheduled)

    def forget(self, request_ids: Collection[str]) -> None:
        """Forgets requests; a grammar that is being compiled is still cached, one that is not begun is left out."""
        self._request_ids.difference_update(request_ids)
        self._stop_waiting(request_ids)

    def _stop_waiting(self, request_ids: Collection[str]) -> None:
        left = [self.waiting.pop(request_id) for request_id in request_ids if request_id in self.waiting]
        if left:
            wanted = {id(compilation) for _, compilation in self.waiting.values()}
            for _, compilation in left:
                if id(compilation) not in wanted:
                    compilation.cancel()

    def take_ready(self, wait_s: float) -> list[Ready]:
        """The requests whose compilation has ended, each with the error of its grammar if it has one.

        `wait_s`: How long to wait for the first of them.
        """
        if wait_s:
            wait([compilation for _, compilation in self.waiting.values()], wait_s, FIRST_COMPLETED)
        ended = [(request, compilation) for request, compilation in self.waiting.values() if compilation.done()]
        self._stop_waiting([request.request_id for request, _ in ended])
        return [(request, _grammar_error(request.request_id, compilation)) for request, compilation in ended]

    def _compilation(self, request: EngineCoreRequest) -> Future[None]:
        parent, compilation = self.waiting.get(request.fork_of, (None, None))
        if parent is not None and compilation is not None and _have_one_grammar(parent, request):
            return compilation  # a fork that is added later than its parent shares no blocks with it
        compilation = Future[None]()
        self._quick.submit(self._compile_or_pass_on, request, compilation)
        return compilation

    def _compile_or_pass_on(self, request: EngineCoreRequest, compilation: Future[None]) -> None:
        """Compiles a grammar that is expected to be quick, and leaves another to the slow threads."""
        constraint = request.sampling_params.structured_outputs
        try:
            is_slow = constraint is not None and self._backend().expected_seconds(constraint) > QUICK_S
        except Exception:  # noqa: BLE001 (compiling raises it again, where it is reported)
            is_slow = False
        if is_slow:
            self._slow.submit(self._compile, request, compilation)
        else:
            self._compile(request, compilation)

    def _compile(self, request: EngineCoreRequest, compilation: Future[None]) -> None:
        constraint = request.sampling_params.structured_outputs
        if not compilation.set_running_or_notify_cancel():
            return
        try:
            if constraint is not None:
                self._backend().compile(constraint, request.eos_token_ids)
        except Exception as error:  # noqa: BLE001 (the engine's thread raises it)
            compilation.set_exception(error)
        else:
            compilation.set_result(None)


def _grammar_error(request_id: str, compilation: Future[None]) -> InvalidRequestError | None:
    """The error of a grammar that does not compile; any error ends that request alone."""
    error = compilation.exception()
    if error is None or isinstance(error, InvalidRequestError):
        return error
    logger.error("the grammar of request %s could not be compiled", request_id, exc_info=error)
    return InvalidRequestError(QuarantinedError.NOT_CONSTRAINABLE)


def _have_one_grammar(one: EngineCoreRequest, other: EngineCoreRequest) -> bool:
    return one.sampling_params.structured_outputs == other.sampling_params.structured_outputs
