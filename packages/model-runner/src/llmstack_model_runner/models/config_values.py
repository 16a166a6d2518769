"""Typed access to the fields of a config.json; each error names the field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmstack_model_runner.layers.rotary import UnsupportedVariantError

# The first field that exists is used; OPT projects its last states to `word_embed_proj_dim`.
_HIDDEN_SIZE_NAMES = ("word_embed_proj_dim", "hidden_size", "n_embd", "d_model", "dim")


def read_int(config: Mapping[str, Any], name: str, default: int | None = None, least: int = 1) -> int:
    """An integer of at least `least`, which is 1 or 0; the default if the field is absent or null."""
    value = config.get(name)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        kind = "a positive integer" if least else "a positive integer or 0"
        raise ValueError(f"config.json: {name} must be {kind}, got {str(value)[:64]}.")
    return value


def read_float(config: Mapping[str, Any], name: str, default: float) -> float:
    value = config.get(name)
    if value is None:
        return default
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ValueError(f"config.json: {name} must be a number, got {str(value)[:64]}.")
    return float(value)


def read_factor(config: Mapping[str, Any], name: str) -> float:
    """A number that is not 0; 1 if the field is absent or null."""
    factor = read_float(config, name, 1.0)
    if factor == 0:
        raise ValueError(f"config.json: {name} must not be 0.")
    return factor


def read_bool(config: Mapping[str, Any], name: str, default: bool) -> bool:
    value = config.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ValueError(f"config.json: {name} must be true or false, got {str(value)[:64]}.")
    return value


def read_num_labels(config: Mapping[str, Any]) -> int:
    """Number of a classifier's labels; two if the configuration has none, since transformers omits that default."""
    names = config.get("id2label")
    if isinstance(names, Mapping) and names:
        return len(names)
    return read_int(config, "num_labels", 2)


def embedding_size(model_config: Mapping[str, Any]) -> int:
    """Width of the last hidden states; 0 if the parsed config.json has no such field, which disables pooling."""
    config = model_config.get("text_config") or model_config
    found = (config.get(name) for name in _HIDDEN_SIZE_NAMES)
    return next((value for value in found if type(value) is int and value > 0), 0)


def read_head_dim(hidden_size: int, num_heads: int) -> int:
    """Size of an attention head; ValueError if the heads do not divide the hidden size."""
    if hidden_size % num_heads:
        raise ValueError(f"config.json: hidden_size {hidden_size} is not a multiple of {num_heads} attention heads.")
    return hidden_size // num_heads


def refuse(config: Mapping[str, Any], name: str, *allowed: object) -> None:
    """Raises ValueError unless the field is absent, null or has one of the allowed values."""
    value = config.get(name)
    if value is not None and value not in allowed:
        raise ValueError(f"config.json: {name} {str(value)[:64]} is not supported.")


def refuse_variant(config: Mapping[str, Any], name: str) -> None:
    """Raises UnsupportedVariantError if the field, which other code may support, is true."""
    if read_bool(config, name, False):
        raise UnsupportedVariantError(f"config.json: {name} is not supported.")


def is_of_gguf(config: Mapping[str, Any]) -> bool:
    """Whether the configuration is that of a GGUF file, which has some tensors in another order or number."""
    quantization = config.get("quantization_config")
    return isinstance(quantization, Mapping) and quantization.get("quant_method") == "gguf"
