"""From one state of each prompt to a number for each label."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from llmstack_model_runner.models.base import Classifier
from llmstack_model_runner.pooling.label_activation import label_activation


class LabelHead:
    """A classifier's head with what its configuration makes of the logits."""

    def __init__(self, model: Classifier, model_config: Mapping[str, Any]) -> None:
        """Raises ValueError where the configuration names an activation that there is not."""
        self._model = model
        self._activation = label_activation(model_config, model.num_labels)

    def __call__(self, states: torch.Tensor, is_activated: Sequence[bool]) -> torch.Tensor:
        """[n, hidden_size] to float32 [n, num_labels]; rows that are not activated keep their logits."""
        logits = self._model.compute_label_logits(states)
        mask = torch.tensor(is_activated, device=logits.device)[:, None]
        return torch.where(mask, self._activation(logits), logits)
