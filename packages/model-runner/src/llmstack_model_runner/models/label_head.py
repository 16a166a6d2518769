"""Label head of a classifier: logits and their activation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from llmstack_model_runner.models.base import Classifier

Activation = Callable[[torch.Tensor], torch.Tensor]

_SOFTMAX: Activation = partial(torch.softmax, dim=-1)
_BY_NAME: Mapping[str, Activation] = {"Identity": torch.clone, "Sigmoid": torch.sigmoid, "Softmax": _SOFTMAX}
_BY_PROBLEM: Mapping[str, Activation] = {
    "regression": torch.clone,
    "single_label_classification": _SOFTMAX,
    "multi_label_classification": torch.sigmoid,
}


class LabelHead:
    """A classifier's head with the activation that its configuration names."""

    def __init__(self, model: Classifier, model_config: Mapping[str, Any]) -> None:
        """Raises ValueError if the configuration names an unknown activation."""
        self._model = model
        self._activation = label_activation(model_config, model.num_labels)

    def __call__(self, states: torch.Tensor, is_activated: Sequence[bool]) -> torch.Tensor:
        """Scores of the labels: [n, hidden_size] to float32 [n, num_labels]; rows not activated are logits."""
        logits = self._model.compute_label_logits(states)
        mask = torch.tensor(is_activated, device=logits.device)[:, None]
        return torch.where(mask, self._activation(logits), logits)


def label_activation(model_config: Mapping[str, Any], num_labels: int) -> Activation:
    """The activation over float32 [n, num_labels].

    The field that sentence-transformers writes for cross encoders has priority over `problem_type`. Without either it
    is a sigmoid for one label and a softmax for several.

    Raises:
        ValueError: The configuration names an unknown activation.
    """
    named = _sentence_transformers_name(model_config)
    if named is not None:
        return _find("the activation of a cross encoder", named.rpartition(".")[2], _BY_NAME)
    problem = model_config.get("problem_type")
    if problem is not None and (num_labels > 1 or problem != "single_label_classification"):
        return _find("problem_type", str(problem), _BY_PROBLEM)
    return torch.sigmoid if num_labels == 1 else _SOFTMAX  # the softmax of a single label is always 1


def _sentence_transformers_name(model_config: Mapping[str, Any]) -> str | None:
    own = model_config.get("sentence_transformers")
    named = own.get("activation_fn") if isinstance(own, Mapping) else None
    if named is None:
        named = model_config.get("sbert_ce_default_activation_function")  # before version 4
    return None if named is None else str(named)


def _find(field: str, name: str, known: Mapping[str, Activation]) -> Activation:
    if name not in known:
        raise ValueError(f"config.json: {field} {name[:64]!r} is not supported; {', '.join(known)} are.")
    return known[name]
