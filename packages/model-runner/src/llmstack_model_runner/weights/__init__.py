"""Fills models with weights: from safetensors files, or made up."""

from llmstack_model_runner.weights.dtype import resolve_dtype
from llmstack_model_runner.weights.load import load_weights

__all__ = ["load_weights", "resolve_dtype"]
