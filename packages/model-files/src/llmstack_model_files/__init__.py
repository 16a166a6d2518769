"""The one opener of model files: folders, configurations and weight headers."""

from llmstack_model_files.adapter_files import AdapterFiles, adapter_digest, check_adapter_folder, read_adapter
from llmstack_model_files.folder import (
    ModelFilesError,
    artifact_path,
    open_artifact,
    overridden,
    parse_json_object,
    read_json,
    read_json_array,
    read_model_config,
)
from llmstack_model_files.gguf import gguf_weights
from llmstack_model_files.mistral_form import ANY_FORM, FileForm, has_own_names
from llmstack_model_files.page_cache import read_ahead
from llmstack_model_files.positions import extended_positions
from llmstack_model_files.registered import PACKAGED, RegisteredModel, is_packaged_model_installed
from llmstack_model_files.resolve import is_local_name, resolve_model
from llmstack_model_files.safetensors_header import (
    TensorInfo,
    check_safetensors,
    check_safetensors_content,
    may_have_tensor,
)
from llmstack_model_files.sentence_modules import COLBERT, DenseModule, SentenceModules, read_modules
from llmstack_model_files.speech_tokens import (
    SECONDS_PER_TIMESTAMP,
    SPEECH_ARCHITECTURE,
    SpeechTokens,
    parse_speech_tokens,
    read_speech_tokens,
)
from llmstack_model_files.text_config import TEXT_PART_OF, WHOLE_CONFIG, text_config_of
from llmstack_model_files.weight_files import safetensors_files, weights_digest

__all__ = [
    "ANY_FORM",
    "COLBERT",
    "PACKAGED",
    "SECONDS_PER_TIMESTAMP",
    "SPEECH_ARCHITECTURE",
    "TEXT_PART_OF",
    "WHOLE_CONFIG",
    "AdapterFiles",
    "DenseModule",
    "FileForm",
    "ModelFilesError",
    "RegisteredModel",
    "SentenceModules",
    "SpeechTokens",
    "TensorInfo",
    "adapter_digest",
    "artifact_path",
    "check_adapter_folder",
    "check_safetensors",
    "check_safetensors_content",
    "extended_positions",
    "gguf_weights",
    "has_own_names",
    "is_local_name",
    "is_packaged_model_installed",
    "may_have_tensor",
    "open_artifact",
    "overridden",
    "parse_json_object",
    "parse_speech_tokens",
    "read_adapter",
    "read_ahead",
    "read_json",
    "read_json_array",
    "read_model_config",
    "read_modules",
    "read_speech_tokens",
    "resolve_model",
    "safetensors_files",
    "text_config_of",
    "weights_digest",
]
