"""GGUF files: their header, and the model folder that they stand for."""

from llmstack_gguf.architecture import ARCHITECTURES, has_interleaved_heads, tensor_name
from llmstack_gguf.folder import cache_folder, gguf_file, model_folder
from llmstack_gguf.header import GGUFError, Header, TensorInfo, read_header
from llmstack_gguf.tensor_types import TENSOR_TYPES, TensorType

__all__ = [
    "ARCHITECTURES",
    "TENSOR_TYPES",
    "GGUFError",
    "Header",
    "TensorInfo",
    "TensorType",
    "cache_folder",
    "gguf_file",
    "has_interleaved_heads",
    "model_folder",
    "read_header",
    "tensor_name",
]
