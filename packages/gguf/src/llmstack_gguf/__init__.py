"""GGUF files: their header, and the model folder that they stand for."""

from llmstack_gguf.architecture import ROPE_TENSORS
from llmstack_gguf.folder import cache_folder, gguf_files, model_folder, picture_folder
from llmstack_gguf.header import GGUFError, Header, TensorInfo, read_header
from llmstack_gguf.made_folders import cache_of, file_identity, filled_folder, is_made_folder, made_folder
from llmstack_gguf.names import ARCHITECTURES, CLASS_NAMES, Target, target_of
from llmstack_gguf.projector import ARCHITECTURE as PROJECTOR
from llmstack_gguf.projector_names import PictureTensor, picture_tensors
from llmstack_gguf.split import read_model, split_names
from llmstack_gguf.tensor_types import TENSOR_TYPES, TensorType
from llmstack_gguf.tokenizer import bpe_model

__all__ = [
    "ARCHITECTURES",
    "CLASS_NAMES",
    "PROJECTOR",
    "ROPE_TENSORS",
    "TENSOR_TYPES",
    "GGUFError",
    "Header",
    "PictureTensor",
    "Target",
    "TensorInfo",
    "TensorType",
    "bpe_model",
    "cache_folder",
    "cache_of",
    "file_identity",
    "filled_folder",
    "gguf_files",
    "is_made_folder",
    "made_folder",
    "model_folder",
    "picture_folder",
    "picture_tensors",
    "read_header",
    "read_model",
    "split_names",
    "target_of",
]
