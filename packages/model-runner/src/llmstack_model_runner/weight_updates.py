"""Change of a runner's weights in place."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from llmstack_model_files import ModelFilesError
from llmstack_model_runner.layers.sharding import Sharding
from llmstack_model_runner.loading import check_weights
from llmstack_types import LLMStackError, ModelRunnerConfig
from llmstack_types.errors import WeightsReloadedError


class WeightUpdates(ABC):
    """A runner that can sleep, and wakes with the weights that its configuration names."""

    _config: ModelRunnerConfig
    _device: torch.device
    _sharding: Sharding

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
        """
        try:
            changed = check_weights(self._config, path, self._device, self._sharding)
        except ModelFilesError as error:
            raise ValueError(str(error)) from error
        before, self._config = self._config, changed
        self.sleep(2)
        try:
            self.wake_up()
        except (ValueError, LLMStackError) as error:
            problem = str(error)
        else:
            return
        # Behind the handler: the error's frames hold what was loaded, for which there is no room beside the old ones.
        self._config = before
        self.sleep(2)
        self.wake_up()
        raise WeightsReloadedError(problem)
