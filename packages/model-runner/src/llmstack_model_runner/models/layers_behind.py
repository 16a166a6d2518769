"""Layers for multi-token prediction behind the last decoder layer: DeepSeek V3."""

from __future__ import annotations

import re

from llmstack_model_runner.models.draft_head import HeadNames
from llmstack_model_runner.models.llama import Llama

_LAYER = re.compile(r"(?:model\.)?layers\.(\d+)\.")


class LayersBehind(Llama):
    """A model whose checkpoints number these layers on; they have copies of the embedding and the head."""

    @classmethod
    def draft_head_names(cls, num_layers: int) -> HeadNames:
        layer = f"model.layers.{num_layers}."
        return HeadNames(
            layer=layer, embedding_norm=f"{layer}enorm", hidden_norm=f"{layer}hnorm", join=f"{layer}eh_proj",
            norm=f"{layer}shared_head.norm",
        )  # fmt: skip

    def is_ignored(self, name: str) -> bool:
        """They are read for drafts alone."""
        layer = _LAYER.match(name)
        num_layers = len(self._layers)
        return (layer is not None and int(layer[1]) >= num_layers) or super().is_ignored(name)
