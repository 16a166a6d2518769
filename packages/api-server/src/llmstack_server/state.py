"""What the routes of one server share."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from llmstack_llm.admit import AdmissionLimits
from llmstack_llm.admit_rules import MAX_LOGPROBS
from llmstack_server.chat.parsers import ChatParsers
from llmstack_server.config import ServeConfig
from llmstack_server.http.in_flight import InFlight
from llmstack_server.lifecycle import Lifecycle
from llmstack_server.protocols import EngineClient
from llmstack_server.watchdog import StuckWatchdog
from llmstack_types import EngineDeadError, EngineReady

if TYPE_CHECKING:
    from llmstack_server.http.metrics import ServerMetrics
    from llmstack_server.peers import Answers, Peers
    from llmstack_server.telemetry.open import Telemetry


@dataclass(slots=True)
class ServerState:
    """One server: its configuration, its engine, and where it is in its life.

    Attributes:
        opened_engine: None while the model is being looked for.
        ready: What the engine core said when it came up; None before.
        telemetry: What follows each request; None where nothing does.
        ticks: Called a few times per second while the server is ready.
        watchdog: Looks for requests that get nowhere.
        facts: Further lines of `/server_info`, such as the kind of chat template.
        peers: The other processes that answer for the same server; None where this is the only one.
        chat_parsers: What reads calls and reasoning from the text of the model.
    """

    config: ServeConfig
    opened_engine: EngineClient | None
    metrics: ServerMetrics
    lifecycle: Lifecycle = field(default_factory=Lifecycle)
    in_flight: InFlight = field(default_factory=InFlight)
    created: int = field(default_factory=lambda: int(time.time()))
    ready: EngineReady | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    telemetry: Telemetry | None = None
    ticks: list[Callable[[], None]] = field(default_factory=list)
    watchdog: StuckWatchdog = field(default_factory=lambda: StuckWatchdog(0.0))
    peers: Peers | None = None
    chat_parsers: ChatParsers = field(default_factory=ChatParsers)

    @property
    def engine(self) -> EngineClient:
        """The engine.

        Raises:
            EngineDeadError: The model is still being looked for.
        """
        if self.opened_engine is None:
            raise EngineDeadError("the engine core is not up")
        return self.opened_engine

    @property
    def served_model_name(self) -> str:
        """The name that answers carry."""
        return self.config.served_model_names[0]

    @property
    def limits(self) -> AdmissionLimits:
        """What the running model can take.

        Raises:
            EngineDeadError: It is not up.
        """
        if self.ready is None:
            raise EngineDeadError("the engine core is not up")
        num_kv_tokens = self.ready.num_blocks * self.ready.block_size
        max_logprobs = self.config.engine.get("max_logprobs", MAX_LOGPROBS)
        return AdmissionLimits(
            self.ready.max_model_len,
            self.ready.vocab_size,
            num_kv_tokens,
            embedding_size=self.ready.embedding_size,
            is_generative=self.ready.is_generative,
            is_causal=self.ready.is_causal,
            num_labels=self.ready.num_labels,
            max_logprobs=self.ready.vocab_size if max_logprobs == -1 else max_logprobs,
        )

    @property
    def system_fingerprint(self) -> str:
        """Changes when answers of the same seed may change: with the model, its type, the device and the versions."""
        ready = self.ready
        parts = (self.config.model, self.config.dtype, ready and ready.dtype, ready and sorted(ready.versions.items()))
        return "fp_" + hashlib.sha256(repr(parts).encode()).hexdigest()[:10]

    def peer_answers(self) -> Answers:
        """What the other processes may ask this one."""
        return {"metrics": self.metrics.snapshot, "load": lambda: self.in_flight.count}

    async def ask_peers(self, question: str) -> list[Any]:
        """What the other processes answer; nothing where there is none."""
        return [] if self.peers is None else await self.peers.ask(question)
