"""Hidden states to logits, by the model's own code after its decoder."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel


class OutputLines:
    """The part of a causal language model's `forward` after its decoder: head, scale and soft cap.

    A stand-in replaces the decoder and returns hidden states that are already computed. The model's own code then
    computes the logits, so none of it is repeated here.
    """

    def __init__(self, model: nn.Module, decoder: nn.Module) -> None:
        """Replaces `decoder`, a part of `model`, by the stand-in."""
        self._model = model
        self._stand_in = StandIn()
        name = next(name for name, module in model.named_modules() if module is decoder)
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, self._stand_in)

    def __call__(self, hidden: torch.Tensor, output_class: type[Any]) -> torch.Tensor:
        """Logits: [n, hidden_size] to float32 [n, vocab_size]; `output_class` is the class that the decoder returns."""
        self._stand_in.output = output_class(last_hidden_state=hidden[None])
        token_ids = torch.zeros((1, len(hidden)), dtype=torch.int64, device=hidden.device)  # some models count them
        logits: torch.Tensor = self._model(input_ids=token_ids, use_cache=False, return_dict=True).logits
        self._stand_in.output = None
        return logits[0].float()


def find_decoder(model: PreTrainedModel) -> nn.Module:
    """The part of a causal language model before its head; the model itself where it has none."""
    found = model.get_decoder()
    if found is model or not isinstance(found, PreTrainedModel):
        found = getattr(model, "model", model)  # some classes have another prefix, or a head of that name
    decoder: nn.Module = found
    return decoder


class StandIn(nn.Module):
    """Module that returns a given output."""

    output: Any = None

    def forward(self, *_: object, **__: object) -> Any:
        return self.output
