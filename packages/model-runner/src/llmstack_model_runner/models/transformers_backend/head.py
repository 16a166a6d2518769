"""Hidden states to logits through the last lines of the class itself: its head, its scale, its soft cap."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class OutputLines:
    """What a causal language model's `forward` does after its decoder.

    The decoder is taken out of the model and a stand-in returns, in its place, hidden states that are already there:
    then the family's own code computes the logits, so nothing of it is repeated here.
    """

    def __init__(self, model: nn.Module, decoder: nn.Module) -> None:
        """Takes `decoder`, a part of `model`, out of it."""
        self._model = model
        self._stand_in = _StandIn()
        name = next(name for name, module in model.named_modules() if module is decoder)
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, self._stand_in)

    def __call__(self, hidden: torch.Tensor, output_class: type[Any]) -> torch.Tensor:
        """[n, hidden_size] to float32 [n, vocab_size]; `output_class` is what the decoder returns."""
        self._stand_in.output = output_class(last_hidden_state=hidden[None])
        logits: torch.Tensor = self._model(use_cache=False, return_dict=True).logits
        self._stand_in.output = None
        return logits[0].float()


class _StandIn(nn.Module):
    """Returns what it was given to return."""

    output: Any = None

    def forward(self, *_: object, **__: object) -> Any:
        return self.output
