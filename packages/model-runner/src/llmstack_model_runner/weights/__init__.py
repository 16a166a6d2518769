"""Weights of models: loading from safetensors files, or dummy weights."""

from llmstack_model_runner.weights.dtype import resolve_dtype
from llmstack_model_runner.weights.load import load_weights
from llmstack_model_runner.weights.pack_cache import kept_weights
from llmstack_model_runner.weights.quantization import check_quantized, describe_quantization, num_weight_bytes

__all__ = [
    "check_quantized", "describe_quantization", "kept_weights", "load_weights", "num_weight_bytes", "resolve_dtype",
]  # fmt: skip
