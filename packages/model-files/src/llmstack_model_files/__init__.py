"""The one opener of model files: finds a repository or folder, opens and checks configurations and weight headers."""

from llmstack_model_files.errors import ModelFilesError
from llmstack_model_files.folder import artifact_path, open_artifact, overridden, read_json, read_json_array
from llmstack_model_files.resolve import resolve_model
from llmstack_model_files.safetensors_header import TensorInfo, check_safetensors
from llmstack_model_files.weight_files import safetensors_files

__all__ = [
    "ModelFilesError",
    "TensorInfo",
    "artifact_path",
    "check_safetensors",
    "open_artifact",
    "overridden",
    "read_json",
    "read_json_array",
    "resolve_model",
    "safetensors_files",
]
