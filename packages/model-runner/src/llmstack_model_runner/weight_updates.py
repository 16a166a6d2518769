"""Change of a runner's weights in place."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch

from llmstack_model_files import ModelFilesError
from llmstack_model_runner.layers.sharding import Sharding
from llmstack_model_runner.loading import ModelReport, check_weights
from llmstack_types import EngineStartError, LLMStackError, ModelRunnerConfig
from llmstack_types.errors import WeightsReloadedError


class WeightUpdates(ABC):
    """A runner that can sleep, and wakes with the weights that its configuration names."""

    _config: ModelRunnerConfig
    _device: torch.device
    _sharding: Sharding
    _report: ModelReport
    _other_config: ModelRunnerConfig | None = None  # with the weights that were checked last, or those before

    @abstractmethod
    def load_model(self) -> None:
        """Reads the weights that the configuration names."""

    @abstractmethod
    def sleep(self, level: int) -> None:
        """Frees the KV storage and, with level 2, the weights."""

    @abstractmethod
    def wake_up(self) -> None:
        """Restores what `sleep` freed."""

    def update_weights(self, path: str) -> None:
        """Takes the weights of a folder in place of its own; rows and cached blocks are lost.

        All of them are read and checked before the own ones are freed, one tensor at a time. Then they are loaded as
        after a sleep, so that there is never room for both in use.

        Raises:
            ValueError: They do not fit, and nothing has changed.
            WeightsReloadedError: They cannot be loaded, and the old ones are back, without adapters.
            EngineStartError: Neither can be loaded.
        """
        self.check_weights(path)
        exchange(self.exchange_weights, self.wake_up)

    def check_weights(self, path: str) -> None:
        """Reads this rank's part of the weights of a folder, which `exchange_weights` then takes.

        Raises:
            ValueError: They cannot take the place of its own.
        """
        try:
            self._other_config = check_weights(self._config, path, self._device, self._sharding)
        except ModelFilesError as error:
            raise ValueError(str(error)) from error

    def exchange_weights(self) -> None:
        """Loads the weights that were checked last in place of its own, or these again when it is called once more.

        The KV storage is freed; `wake_up` allocates it.

        Raises:
            ValueError: They cannot be loaded, and there are none.
        """
        if self._other_config is None:
            raise ValueError("no weights were checked")
        self._config, self._other_config = self._other_config, self._config
        self.sleep(2)
        try:
            self.load_model()
        except LLMStackError as error:
            raise ValueError(str(error)) from error

    @property
    def updated_digest(self) -> str:
        """The digest of the content of weights that have taken the place of those of the start; else empty."""
        return self._report.weights_digest if self._config.weights_path else ""


def exchange(load: Callable[[], None], wake_up: Callable[[], None]) -> None:
    """Lets `load` take the next weights, then wakes up; if it fails, it is called again for those before.

    Raises:
        WeightsReloadedError: They cannot be loaded, and those before are back.
        EngineStartError: Neither can be loaded.
    """
    problem = _refusal(load)
    # Behind the handler: the error's frames hold what was loaded, for which there is no room beside the old ones.
    if problem and (again := _refusal(load)):
        raise EngineStartError(f"the weights before cannot be loaded again: {again}")
    wake_up()
    if problem:
        raise WeightsReloadedError(problem)


def _refusal(load: Callable[[], None]) -> str:
    """Why weights were not loaded; empty where they were."""
    try:
        load()
    except ValueError as error:
        return str(error) or type(error).__name__
    return ""
