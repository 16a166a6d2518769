"""Weights of all ranks that change in place."""

from __future__ import annotations

from abc import abstractmethod
from functools import partial

from llmstack_model_runner.weight_updates import exchange
from llmstack_parallel.beside_steps import BesideSteps
from llmstack_parallel.messages import WeightsMessage


class RankWeights(BesideSteps):
    """A runner of several ranks whose weights change in all of them, or in none."""

    @abstractmethod
    def wake_up(self) -> None:
        """Allocates the KV storage of all ranks."""

    def update_weights(self, path: str) -> None:
        """Takes the weights of a folder in all ranks; rows and cached blocks are lost.

        Each rank reads and checks its part, and nothing is freed before all of them have. A rank that is lost ends all.

        Raises:
            ValueError: They do not fit in some rank, and nothing has changed.
            WeightsReloadedError: Some rank cannot load them, and all have the old ones again, without adapters.
            EngineStartError: Some rank can load neither.
            LostRankError: A rank has ended or does not answer.
        """
        self._ask_all(WeightsMessage(path), partial(self._started[1].check_weights, path))
        exchange(self._exchange, self.wake_up)

    def _exchange(self) -> None:
        """Loads the weights that all ranks have checked, or those before again."""
        runner = self._started[1]
        answers = self._ask_all(WeightsMessage(), runner.exchange_weights)
        if any(answer.digest != runner.updated_digest for answer in answers):
            raise ValueError("the folder has other weights on another node, or its files have changed meanwhile")
