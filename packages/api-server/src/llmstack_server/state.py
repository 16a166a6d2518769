"""What the routes of one server share."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from llmstack_llm.admit import AdmissionLimits
from llmstack_server.config import ServeConfig
from llmstack_server.http.in_flight import InFlight
from llmstack_server.lifecycle import Lifecycle
from llmstack_server.protocols import EngineClient
from llmstack_types import EngineDeadError, EngineReady

if TYPE_CHECKING:
    from llmstack_server.http.metrics import ServerMetrics


@dataclass(slots=True)
class ServerState:
    """One server: its configuration, its engine, and where it is in its life.

    Attributes:
        opened_engine: None while the model is being looked for.
        ready: What the engine core said when it came up; None before.
        facts: Further lines of `/server_info`, such as the kind of chat template.
    """

    config: ServeConfig
    opened_engine: EngineClient | None
    metrics: ServerMetrics
    lifecycle: Lifecycle = field(default_factory=Lifecycle)
    in_flight: InFlight = field(default_factory=InFlight)
    created: int = field(default_factory=lambda: int(time.time()))
    ready: EngineReady | None = None
    facts: dict[str, Any] = field(default_factory=dict)

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
        return AdmissionLimits(
            self.ready.max_model_len,
            self.ready.vocab_size,
            num_kv_tokens,
            embedding_size=self.ready.embedding_size,
            is_generative=self.ready.is_generative,
            is_causal=self.ready.is_causal,
            num_labels=self.ready.num_labels,
        )

    @property
    def system_fingerprint(self) -> str:
        """Changes when answers of the same seed may change: with the model, its type, the device and the versions."""
        ready = self.ready
        parts = (self.config.model, self.config.dtype, ready and ready.dtype, ready and sorted(ready.versions.items()))
        return "fp_" + hashlib.sha256(repr(parts).encode()).hexdigest()[:10]
