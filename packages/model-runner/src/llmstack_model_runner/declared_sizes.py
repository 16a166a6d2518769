"""Costs of the sizes in a config.json, before torch is loaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

MAX_DUMMY_LAYERS: Final = 4096
"""Layers of a model without weight files; each layer takes about a millisecond to build."""
# Those of `layers.rotary`, which imports torch, and of transformers.
ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "su", "llama3", "proportional")
_SIZES = (
    "vocab_size",
    "hidden_size",
    "n_embd",
    "d_model",
    "intermediate_size",
    "decoder_ffn_dim",
    "num_hidden_layers",
    "n_layer",
    "decoder_layers",
    "num_attention_heads",
    "n_head",
    "decoder_attention_heads",
    "num_key_value_heads",
    "num_kv_heads",
    "head_dim",
)


def first_int(config: Mapping[str, Any], *names: str) -> int:
    """The first of the fields that is a positive integer; 0 where none is."""
    found = (config.get(name) for name in names)
    return next((value for value in found if type(value) is int and value > 0), 0)


def text_fields(model_config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The fields of the language model, which some configurations keep apart."""
    found = model_config.get("text_config")
    return found if isinstance(found, Mapping) and found else model_config


def rope_problems(model_config: Mapping[str, Any]) -> Iterator[str]:
    """A sentence for each rotary embedding of a type that neither our code nor that of transformers knows."""
    text = text_fields(model_config)
    found = text.get("rope_parameters") or text.get("rope_scaling")
    if not isinstance(found, Mapping):
        return
    by_layer_type = [value for value in found.values() if isinstance(value, Mapping)]
    for parameters in (found, *by_layer_type):
        kind = parameters.get("rope_type", parameters.get("type", "default"))
        if kind not in ROPE_TYPES:
            listed = ", ".join(ROPE_TYPES)
            yield f"config.json: rotary embedding of type {repr(kind)[:64]} is not supported; {listed} are."


def size_problems(model_config: Mapping[str, Any]) -> Iterator[str]:
    """A sentence for each size that is no positive integer. A size may be left out or null."""
    text = text_fields(model_config)
    for name in _SIZES:
        value = text.get(name)
        if value is not None and (type(value) is not int or value < 1):
            yield f"config.json: {name} must be a positive integer, got {repr(value)[:64]}."


def least_parameters(model_config: Mapping[str, Any]) -> int:
    """A lower bound of a model's parameters: token embedding, attention, and one feed-forward block per layer.
    Of a model with an encoder, the decoder alone.

    Experts count as one block. Sizes that the configuration leaves out count as nothing.
    """
    text = text_fields(model_config)
    hidden_size = first_int(text, "hidden_size", "n_embd", "d_model")
    width = min(hidden_size, first_int(text, "word_embed_proj_dim") or hidden_size)
    num_heads = first_int(text, "num_attention_heads", "n_head", "decoder_attention_heads")
    head_dim = first_int(text, "v_head_dim", "head_dim") or (hidden_size // num_heads if num_heads else 0)
    inner_size = first_int(text, "intermediate_size", "ffn_dim", "n_inner", "decoder_ffn_dim")
    inner_size = min(inner_size, first_int(text, "moe_intermediate_size") or inner_size)
    num_layers = first_int(text, "num_hidden_layers", "n_layer", "decoder_layers")
    # Layers may share a few blocks with attention.
    num_layers = min(num_layers, first_int(text, "num_mem_blocks") or num_layers)
    # Queries and output of the attention; two matrices of the feed-forward block.
    per_layer = 2 * hidden_size * (num_heads * head_dim + inner_size)
    if first_int(text, "kv_lora_rank"):  # queries may be made of a smaller latent
        per_layer = hidden_size * (num_heads * head_dim + 2 * inner_size)
    return first_int(text, "vocab_size") * width + num_layers * per_layer
