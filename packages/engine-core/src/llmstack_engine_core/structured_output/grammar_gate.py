"""Constrained requests that wait for their grammars to be compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from llmstack_engine_core.protocols import ConstraintBackend
from llmstack_types import EngineCoreRequest, InvalidRequestError, RequestStatus

NUM_COMPILING_THREADS = 2


class GrammarGate:
    """Compiles grammars beside the steps, in threads that release the interpreter's lock for most of the time.

    Other requests overtake one whose grammar is being compiled.

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
        self._pool: ThreadPoolExecutor | None = None

    def add(self, request: EngineCoreRequest) -> None:
        """Begins to compile the request's grammar."""
        self.waiting[request.request_id] = (request, self._compilation(request))
        self._on_status(request.request_id, RequestStatus.WAITING_FOR_GRAMMAR)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Forgets requests; a grammar that is being compiled is still cached."""
        for request_id in request_ids:
            self.waiting.pop(request_id, None)

    def take_compiled(self, wait_s: float) -> list[tuple[EngineCoreRequest, InvalidRequestError | None]]:
        """The requests whose compilation has ended, each with the error of its grammar if it has one.

        `wait_s`: How long to wait for the first of them.
        """
        if wait_s:
            wait([compilation for _, compilation in self.waiting.values()], wait_s, FIRST_COMPLETED)
        ended = [(request, compilation) for request, compilation in self.waiting.values() if compilation.done()]
        self.abort([request.request_id for request, _ in ended])
        return [(request, _grammar_error(compilation)) for request, compilation in ended]

    def _compilation(self, request: EngineCoreRequest) -> Future[None]:
        parent, compilation = self.waiting.get(request.fork_of, (None, None))
        if parent is not None and compilation is not None and _have_one_grammar(parent, request):
            return compilation  # a fork that is added later than its parent shares no blocks with it
        if self._pool is None:
            self._pool = ThreadPoolExecutor(NUM_COMPILING_THREADS, "compile-grammar")
        return self._pool.submit(self._compile, request)

    def _compile(self, request: EngineCoreRequest) -> None:
        constraint = request.sampling_params.structured_outputs
        if constraint is not None:
            self._backend().compile(constraint, request.eos_token_ids)


def _grammar_error(compilation: Future[None]) -> InvalidRequestError | None:
    """The error of a grammar that does not compile; any other error is a bug and is raised."""
    try:
        compilation.result()
    except InvalidRequestError as error:
        return error
    return None


def _have_one_grammar(one: EngineCoreRequest, other: EngineCoreRequest) -> bool:
    return one.sampling_params.structured_outputs == other.sampling_params.structured_outputs
