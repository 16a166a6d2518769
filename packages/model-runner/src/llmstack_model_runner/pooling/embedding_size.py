"""How wide the hidden states of a model are that pooling takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# The first name that a configuration has counts; OPT projects its last states to `word_embed_proj_dim`.
_NAMES = ("word_embed_proj_dim", "hidden_size", "n_embd", "d_model", "dim")


def embedding_size(model_config: Mapping[str, Any]) -> int:
    """Width of the last hidden states by a parsed config.json; 0 where it does not say, and nothing is pooled."""
    config = model_config.get("text_config") or model_config
    found = (config.get(name) for name in _NAMES)
    return next((value for value in found if type(value) is int and value > 0), 0)
