"""Reads of all ranks beside their steps: adapters, and the texts of tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable

from llmstack_model_runner.model_runner import ModelRunner
from llmstack_parallel.messages import (
    MESSAGES,
    AdapterCall,
    AdapterMessage,
    Answer,
    Failure,
    TextsMessage,
    WeightsMessage,
)
from llmstack_parallel.protocols import Peers
from llmstack_parallel.rank_loop import START_TIMEOUT_S, tried


class BesideSteps(ABC):
    """A runner of several ranks, each of which begins to read by one message, and answers another one."""

    @property
    @abstractmethod
    def _started(self) -> tuple[Peers, ModelRunner]:
        """The other ranks, and the runner of rank 0."""

    @abstractmethod
    def _settle(self) -> None:
        """Computes what the other ranks wait for."""

    @abstractmethod
    def _send(self, ranks: Iterable[int], frame: bytes) -> None:
        """Sends a frame to ranks."""

    @abstractmethod
    def _receive_all(self, timeout_s: float) -> list[Answer | Failure]:
        """The answers of the other ranks."""

    def announce_adapter(self, identity: str, path: str) -> None:
        """Lets the other ranks read an adapter beside their steps."""
        self._send_to_all(AdapterMessage(AdapterCall.READ, identity, path))

    def read_adapter(self, identity: str, path: str) -> object:
        """Reads rank 0's part of an adapter; in any thread.

        Raises:
            ValueError: It cannot be served; the text is one sentence.
        """
        return self._started[1].read_adapter(identity, path)

    def add_adapter(self, identity: str, adapter: object) -> None:
        """Makes an adapter available in all ranks, or in none.

        Raises:
            ValueError: Another rank cannot read it.
        """
        self._settle()
        self._started[1].add_adapter(identity, adapter)
        try:
            self._ask_all(AdapterMessage(AdapterCall.ADD, identity))
        except ValueError:
            self.remove_adapter(identity)
            raise

    def remove_adapter(self, identity: str) -> None:
        """Drops an adapter in all ranks."""
        self._started[1].remove_adapter(identity)
        self._send_to_all(AdapterMessage(AdapterCall.REMOVE, identity))

    def announce_token_texts(self) -> None:
        """Lets all other ranks read the texts of tokens beside their steps."""
        self._send_to_all(TextsMessage())

    def read_token_texts(self) -> None:
        """Reads those of rank 0; in any thread. Raises whatever they cannot be read for."""
        self._started[1].read_token_texts()

    def hold_token_texts(self) -> None:
        """Returns when all ranks have the texts, which each of them began to read when it was asked.

        Raises:
            ValueError: Another rank cannot read them.
        """
        self._ask_all(TextsMessage(is_due=True))

    def _ask_all(
        self, message: AdapterMessage | TextsMessage | WeightsMessage, own: Callable[[], object] = lambda: None
    ) -> list[Answer]:
        """The answers of all other ranks, once they have done it, and rank 0 has done `own` meanwhile.

        Raises:
            ValueError: One of them cannot; the others have done it.
        """
        self._settle()
        self._send_to_all(message)
        mine = tried(own)
        answers = self._receive_all(START_TIMEOUT_S)
        for answer in (mine, *answers):
            if isinstance(answer, Failure):
                raise ValueError(answer.reason)
        return [answer for answer in answers if isinstance(answer, Answer)]

    def _send_to_all(self, message: AdapterMessage | TextsMessage | WeightsMessage) -> None:
        peers, _ = self._started
        self._send(peers.channels, MESSAGES.encode(message, peers.epoch))
