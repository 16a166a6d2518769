"""The state of one server: configuration, engine, metrics, lifecycle."""

from __future__ import annotations

import functools
import hashlib
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, Self

from llmstack_output_parsers import ReasoningParserFactory, ToolParserFactory
from llmstack_server.observability.watchdog import StuckWatchdog
from llmstack_server.options.config import ServeConfig
from llmstack_server.options.reload_options import START_NAME
from llmstack_server.state.idle_sleep import IdleSleep
from llmstack_server.state.in_flight import InFlight
from llmstack_server.state.lifecycle import Lifecycle
from llmstack_server.state.queue_monitor import QueueMonitor
from llmstack_server.state.recent_requests import RecentRequests
from llmstack_server.state.request_ids import RequestIds
from llmstack_server.state.shared_adapters import SharedAdapters
from llmstack_server.state.shared_streams import SharedStreams
from llmstack_server.state.slow_readers import SlowReaders
from llmstack_server.state.turns import Turns
from llmstack_types import EngineDeadError, EngineReady
from llmstack_types.json_values import JSONValue

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from llmstack_llm import AsyncLLM, RequestOutput
    from llmstack_llm.requests import AdmittedRequest
    from llmstack_server.observability.metrics import ServerMetrics
    from llmstack_server.observability.telemetry.open import Telemetry
    from llmstack_server.state.peers import Answers, Peers


logger = logging.getLogger(__name__)

MAX_PREVIOUS_WEIGHTS = 8


class OutputStream(Protocol):
    """Outputs of the prompts that were submitted together: a `GenerationStream`, or what notes something of one."""

    prompts: Sequence[AdmittedRequest]

    def __aiter__(self) -> AsyncIterator[RequestOutput]: ...
    async def __anext__(self) -> RequestOutput: ...
    async def aclose(self) -> None: ...
    def fail_after(self, timeout_s: float, error: Exception) -> None: ...
    def follow(self, take: Callable[[RequestOutput], bool]) -> None: ...
    async def __aenter__(self) -> Self: ...
    async def __aexit__(self, *exc_info: object) -> None: ...


class Sign(Protocol):
    """Makes the receipt of one answer."""

    def __call__(self, answer_id: str, model: str, created: int, *, has_token_ids: bool = False) -> dict[str, object]:
        """The signed receipt, once all outputs are read; `created` is in seconds since 1970."""
        ...


class Signer(Protocol):
    """The signer of a server's answers."""

    def note(self, state: ServerState, outputs: OutputStream) -> tuple[OutputStream, Sign]:
        """The outputs of a request, and what makes the receipt of its answer once they are read."""
        ...


class SharedReloads(Protocol):
    """The interface by which all API processes of the server reload together."""

    async def reload(self, name: str, *, moves: bool) -> tuple[int, int]:
        """Reloads in all of them; the numbers of requests that moved, and that finish where they are.

        Raises:
            ReloadError: Nothing has changed in any; the text says why.
        """
        ...


class StoredFiles(Protocol):
    """The files that clients have uploaded."""

    async def paths(self, file_ids: Set[str], owner: str) -> Mapping[str, str]:
        """The path of each file that there is and that belongs to the owner.

        Raises:
            HTTPError: 503, while they cannot be read.
        """
        ...


@dataclass(frozen=True, slots=True)
class ChatParsers:
    """The parsers of one server.

    Attributes:
        tool: Parses tool calls; None where there is no parser.
        reasoning: Parses reasoning; None where all text is content.
        facts: How each parser was chosen, for `/server_info` and the log.
    """

    tool: ToolParserFactory | None = None
    reasoning: ReasoningParserFactory | None = None
    facts: tuple[tuple[str, str], ...] = ()


@dataclass
class ServerState:
    """The state of one server, which all routes share.

    Attributes:
        opened_engine: The engine; None while the model is being resolved.
        ready: The engine core's READY message; None before it.
        telemetry: Observers of each request; None where there are none.
        ticks: Functions called a few times per second while the server is ready.
        at_ready: Functions called once when the engine is ready, on the event loop.
        at_end: Functions awaited at the end of the server, when no request is in flight.
        watchdog: Finds requests that make no progress.
        facts: Further lines of `/server_info`, such as the kind of chat template.
        sampling_defaults: The sampling defaults of the model that answers new requests.
        peers: The other API processes of the server; None where this is the only one.
        queue: Follows the queues of the engine cores, and predicts how long a request waits.
        recent_requests: The last requests, with their predicted first tokens.
        decoding: The turns at decoding large bodies.
        is_paused: Whether new requests are refused until `/resume`.
        is_updating_weights: Whether they are refused until the weights have changed in place.
        request_ids: The ids that clients have given to running requests.
        adapters: The component that keeps the adapters of all API processes equal.
        slow_readers: How long streams have waited for their clients to read.
        streams: The answers that outlive their connections.
        receipts: Signs what has computed an answer; None where answers carry no receipt.
        weights_name: The name of the weights that answer new requests.
        previous_weights: Earlier weights, the last ones first.
        is_reloading: Whether this process alone loads other weights.
        start_model_path: The folder of the model that the server has begun with, once another one was loaded.
        shared_reloads: Reloads in all API processes; None where this is the only one.
        application: Answers requests of the server itself, such as those of a batch; None before it is built.
        stored_files: The files that clients have uploaded; None where none are kept.
        chat_parsers: Parsers of tool calls and reasoning in the model's text.
        idle: Lets the engine sleep while nothing uses it; None where it never does by itself.
        is_one_of_several: Whether other models are beside this one: its engine may end, and the server goes on.
        is_name_taken: Whether another model has a name, or an adapter of it.
        num_left_answers: Answers that an earlier server had not finished; they go on when the engine is ready.
    """

    config: ServeConfig
    opened_engine: AsyncLLM | None
    metrics: ServerMetrics
    lifecycle: Lifecycle = field(default_factory=Lifecycle)
    in_flight: InFlight = field(default_factory=InFlight)
    created: int = field(default_factory=lambda: int(time.time()))
    ready: EngineReady | None = None
    facts: dict[str, object] = field(default_factory=dict)
    sampling_defaults: Callable[[], Mapping[str, object]] = dict
    telemetry: Telemetry | None = None
    ticks: list[Callable[[], None]] = field(default_factory=list)
    at_ready: list[Callable[[], None]] = field(default_factory=list)
    at_end: list[Callable[[], Awaitable[None]]] = field(default_factory=list)
    watchdog: StuckWatchdog = field(default_factory=lambda: StuckWatchdog(0.0))
    peers: Peers | None = None
    queue: QueueMonitor = field(default_factory=QueueMonitor)
    recent_requests: RecentRequests = field(default_factory=RecentRequests)
    decoding: Turns = field(default_factory=Turns)
    is_paused: bool = False
    is_updating_weights: bool = False
    request_ids: RequestIds = field(default_factory=RequestIds)
    adapters: SharedAdapters = field(default_factory=SharedAdapters)
    slow_readers: SlowReaders = field(default_factory=SlowReaders)
    streams: SharedStreams = field(default_factory=SharedStreams)
    chat_parsers: ChatParsers = field(default_factory=ChatParsers)
    receipts: Signer | None = None
    application: ASGIApp | None = None
    stored_files: StoredFiles | None = None
    weights_name: str = START_NAME
    previous_weights: deque[dict[str, object]] = field(default_factory=lambda: deque(maxlen=MAX_PREVIOUS_WEIGHTS))
    is_reloading: bool = False
    start_model_path: str = ""
    shared_reloads: SharedReloads | None = None
    idle: IdleSleep | None = None
    is_one_of_several: bool = False
    is_name_taken: Callable[[str], bool] = lambda _: False
    num_left_answers: int = 0

    def __post_init__(self) -> None:
        processes = self.config.processes
        if processes.idle_sleep_s is not None:
            self.idle = IdleSleep(
                lambda: self.opened_engine, processes.idle_sleep_s, processes.idle_sleep_level,
                name=self.served_model_name,
            )  # fmt: skip
            self.ticks.append(self.idle.tick)
            self.metrics.follow_idle(self.idle)
        self.metrics.follow_media(lambda: None if self.opened_engine is None else self.opened_engine.media_stats)
        self.metrics.follow_speech(lambda: None if self.opened_engine is None else self.opened_engine.speech)

    def weights_object(self) -> dict[str, object]:
        """The weights that answer new requests: their name in the list of `--reload-models`, and what they are."""
        ready = self.ready
        return {
            "name": self.weights_name,
            "digest": None if ready is None else ready.backends.get("weights"),
            "numeric_contract_id": None if ready is None else ready.numeric_contract_id or None,
            "system_fingerprint": self.system_fingerprint,
        }

    def follow_start(self, ready: EngineReady) -> None:
        """Notes that an engine answers new requests, the first one or another one of the same model."""
        self.ready = ready
        self.__dict__.pop("system_fingerprint", None)

    def follow_reload(self, name: str, ready: EngineReady) -> None:
        """Notes that new requests are answered with other weights, and so with another fingerprint."""
        if self.ready is not None and not self.start_model_path:
            self.start_model_path = self.ready.model_path
        self.previous_weights.appendleft(self.weights_object())
        self.weights_name, self.ready = name, ready
        self.__dict__.pop("system_fingerprint", None)

    async def end(self) -> None:
        """Awaits all of `at_end`; the error of one is logged, and does not keep the others from ending."""
        for end in self.at_end:
            try:
                await end()
            except Exception:
                logger.exception("a part of the server has failed at its end")

    @property
    def engine(self) -> AsyncLLM:
        """The engine front end.

        Raises:
            EngineDeadError: The model is still being resolved.
        """
        if self.opened_engine is None:
            raise EngineDeadError("the engine core is not up")
        return self.opened_engine

    @property
    def served_model_name(self) -> str:
        """The name in answers: the first of the served names."""
        return self.config.served_model_names[0]

    @functools.cached_property
    def system_fingerprint(self) -> str:
        """Changes with the model, its data type, the device and the versions: when answers to one seed may change.

        Read it once the engine is ready.
        """
        ready = self.ready
        reloaded: tuple[str, ...] = ()
        if ready is not None and self.weights_name != START_NAME:
            reloaded = (f"{self.weights_name} {ready.backends.get('weights')} {ready.numeric_contract_id}",)
        parts = (
            self.config.model,
            self.config.engine.dtype,
            ready and ready.dtype,
            ready and sorted(ready.versions.items()),
            *reloaded,
        )
        return "fp_" + hashlib.sha256(repr(parts).encode()).hexdigest()[:10]

    def peer_answers(self) -> Answers:
        """Answers to the questions of other API processes."""
        return {"metrics": self.metrics.snapshot, "load": lambda: self.in_flight.count}

    async def ask_peers(self, question: str) -> list[JSONValue]:
        """The answers of the other API processes; an empty list where there are none."""
        return [] if self.peers is None else await self.peers.ask(question)
