"""What a classifier's configuration makes of its logits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

Activation = Callable[[torch.Tensor], torch.Tensor]

_SOFTMAX: Activation = partial(torch.softmax, dim=-1)
_BY_NAME: Mapping[str, Activation] = {"Identity": torch.clone, "Sigmoid": torch.sigmoid, "Softmax": _SOFTMAX}
_BY_PROBLEM: Mapping[str, Activation] = {
    "regression": torch.clone,
    "single_label_classification": _SOFTMAX,
    "multi_label_classification": torch.sigmoid,
}


def label_activation(model_config: Mapping[str, Any], num_labels: int) -> Activation:
    """The function over float32 [n, num_labels] that gives each label its number.

    What sentence-transformers writes for cross encoders comes first, then `problem_type`; without either it is a
    sigmoid of one label and a softmax of several.

    Raises:
        ValueError: The configuration names a function that there is not.
    """
    named = _sentence_transformers_name(model_config)
    if named is not None:
        return _find("the activation of a cross encoder", named.rpartition(".")[2], _BY_NAME)
    problem = model_config.get("problem_type")
    if problem is not None and (num_labels > 1 or problem != "single_label_classification"):
        return _find("problem_type", str(problem), _BY_PROBLEM)
    return torch.sigmoid if num_labels == 1 else _SOFTMAX  # one label alone would always have a softmax of 1


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
