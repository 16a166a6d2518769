"""DistilBERT: BERT with half the layers, no token types, and other names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from llmstack_model_runner.models.bert import Bert

# BERT's name of a field to DistilBERT's name and default.
_FIELDS: Mapping[str, tuple[str, Any]] = {
    "hidden_size": ("dim", 768),
    "num_hidden_layers": ("n_layers", 6),
    "num_attention_heads": ("n_heads", 12),
    "intermediate_size": ("hidden_dim", 3072),
    "hidden_act": ("activation", "gelu"),
}
# Parts of tensor names, DistilBERT's to BERT's.
_PARTS: Mapping[str, str] = {
    "transformer.layer.": "encoder.layer.",
    ".attention.q_lin.": ".attention.self.query.",
    ".attention.k_lin.": ".attention.self.key.",
    ".attention.v_lin.": ".attention.self.value.",
    ".attention.out_lin.": ".attention.output.dense.",
    ".sa_layer_norm.": ".attention.output.LayerNorm.",
    ".ffn.lin1.": ".intermediate.dense.",
    ".ffn.lin2.": ".output.dense.",
    ".output_layer_norm.": ".output.LayerNorm.",
}


class DistilBert(Bert):
    """`DistilBertModel`, and `DistilBertForMaskedLM` without its head."""

    root: ClassVar[str] = "distilbert."
    renamed: ClassVar[Mapping[str, str]] = {**_PARTS, **Bert.renamed}
    has_token_types: ClassVar[bool] = False

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        named = {name: config.get(own, default) for name, (own, default) in _FIELDS.items()}
        super().__init__({**config, **named, "layer_norm_eps": 1e-12}, dtype, device)

    def is_ignored(self, name: str) -> bool:
        """Whether only other tasks need the tensor."""
        return name.startswith(("vocab_", "pre_classifier.", "qa_outputs.")) or super().is_ignored(name)
