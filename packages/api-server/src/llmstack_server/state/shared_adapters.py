"""LoRA adapters, the same ones in every API process of a server."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

from llmstack_llm.adapters import AdapterRegistry
from llmstack_server.state.peers import Peers
from llmstack_types import InvalidRequestError

logger = logging.getLogger(__name__)

TOPIC: Final = "adapters"
PUBLISH_TIMEOUT_S = 10.0
START_TIMEOUT_S = 60.0  # other processes that start import for seconds


class SharedAdapters:
    """Each process has a registry. Before a change is answered, the other processes have taken it over.

    One process at a time changes the adapter of a name: it asks all others first, and of two that ask at once the one
    with the lower index goes on. A process that starts takes the registries of those that run.
    """

    def __init__(self) -> None:
        self._key_to_is_settled: dict[str, bool] = {}  # names that change here, and whether all others have agreed
        self._lost: set[str] = set()
        self._peers: Peers | None = None
        self._registry: Callable[[], AdapterRegistry | None] = lambda: None
        self._is_complete = False

    def share(self, peers: Peers | None, registry: Callable[[], AdapterRegistry | None]) -> None:
        """Shares the registry, which is None until there is an engine."""
        self._peers = peers
        self._registry = registry
        if peers is not None:
            peers.add_topic(TOPIC, self._answer)

    def share_changes(self, other: SharedAdapters) -> None:
        """Lets changes of two models of a process exclude each other: one at a time has a name."""
        self._key_to_is_settled = other._key_to_is_settled

    async def begin(self, load_configured: Callable[[], Awaitable[None]]) -> None:
        """Takes the adapters of the other processes; where none runs, those that the server has from the start."""
        if not await self._take_all():
            await load_configured()
        self._is_complete = True
        await self._take_all()  # what has changed meanwhile

    @asynccontextmanager
    async def changing(self, name: str) -> AsyncIterator[None]:
        """Keeps other changes of a name away, in all processes.

        Raises:
            InvalidRequestError: It is being changed.
            TimeoutError: Another process does not answer.
        """
        key = hashlib.sha256(name.encode(errors="replace")).hexdigest()
        if key in self._key_to_is_settled:
            raise _changing(name)
        self._key_to_is_settled[key] = False
        try:
            if self._peers is not None:
                answers = await self._peers.ask_all(f"{TOPIC} claim {key} {self._peers.index}", PUBLISH_TIMEOUT_S)
                if "held" in answers or key in self._lost:
                    raise _changing(name)
            self._key_to_is_settled[key] = True
            yield
        finally:
            del self._key_to_is_settled[key]
            self._lost.discard(key)

    async def publish(self) -> None:
        """Waits until the other processes have taken this one's registry.

        Raises:
            TimeoutError: One of them does not answer.
        """
        if self._peers is not None:
            await self._peers.ask_all(f"{TOPIC} take {self._peers.index}", PUBLISH_TIMEOUT_S)

    async def _take_all(self) -> bool:
        """Whether another process is complete."""
        registry = self._registry()
        if self._peers is None or registry is None or not registry.is_enabled:
            return False
        try:
            answers = await self._peers.ask_all(f"{TOPIC} list", START_TIMEOUT_S)
        except TimeoutError:
            logger.warning("an API process does not answer, so its adapters are not known here")
            return False
        snapshots = [one for one in answers if one]
        for snapshot in snapshots:
            registry.merge(snapshot)
        return bool(snapshots)

    async def _answer(self, question: str) -> Any:
        word, *arguments = question.split(" ")
        if word == "claim":
            return self._answer_to_claim(arguments[0], int(arguments[1]))
        registry = self._registry() if self._is_complete else None
        if registry is None or self._peers is None:
            return False  # a process that starts takes everything later
        if word == "list":
            return registry.snapshot()
        snapshot = await self._peers.ask_one(int(arguments[0]), f"{TOPIC} list")
        if snapshot:
            registry.merge(snapshot)
        return True if snapshot else None  # without an answer it is asked again

    def _answer_to_claim(self, key: str, index: int) -> str:
        is_settled = self._key_to_is_settled.get(key)
        if is_settled is None or self._peers is None:
            return "free"
        if not is_settled and index < self._peers.index:
            self._lost.add(key)
            return "free"
        return "held"


def _changing(name: str) -> InvalidRequestError:
    message = f"The lora adapter '{name[:64]}' is being loaded or unloaded; try again when that has ended."
    return InvalidRequestError(message, param="lora_name", code="invalid_value")
