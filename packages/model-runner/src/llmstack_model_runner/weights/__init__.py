"""Weights of models: loading from safetensors files, or dummy weights."""

from llmstack_model_runner.weights.dtype import resolve_dtype
from llmstack_model_runner.weights.load import load_weights, read_without_keeping
from llmstack_model_runner.weights.pack_cache import kept_weights
from llmstack_model_runner.weights.quantization import describe_quantization, num_weight_bytes, scheme_on
from llmstack_model_runner.weights.ties import read_served_config

__all__ = [
    "describe_quantization", "kept_weights", "load_weights", "num_weight_bytes",
    "read_served_config", "read_without_keeping", "resolve_dtype", "scheme_on",
]  # fmt: skip
