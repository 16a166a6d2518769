"""Fills models with weights: from safetensors files, or made up."""

from llmstack_model_runner.weights.dtype import resolve_dtype
from llmstack_model_runner.weights.load import load_weights
from llmstack_model_runner.weights.quantization import describe_quantization, refuse_quantized_checkpoint

__all__ = ["describe_quantization", "load_weights", "refuse_quantized_checkpoint", "resolve_dtype"]
