"""Classes of transformers for a config.json; no code of a repository is run."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING,
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
)

from llmstack_model_files import extended_positions
from llmstack_model_runner.checkpoint_formats.config import QUANTIZATION_FIELDS
from llmstack_model_runner.models.transformers_backend.attention import IMPLEMENTATION, register_attention

_DEFAULT_MAX_MODEL_LEN = 2048
_FIXED_ATTENTION = "its attention cannot be replaced (transformers gives it no pluggable interface)"
_WHOLES: tuple[tuple[Mapping[str, Any], Any], ...] = (
    (MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING),
    (MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES, MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING),
)
"""Names and classes of models that take pictures, and of those that take sound."""

# Fields that choose code rather than describe the model: kernels from the hub, other files, patches of classes, other
# readers of quantized weights.
_NOT_THE_MODELS = (
    *QUANTIZATION_FIELDS,
    "attn_implementation", "auto_map", "distributed_config", "experts_implementation", "fusion_config", "kernel_config",
    "name_or_path", "transformers_weights",
)  # fmt: skip


class UnsupportedByTransformersError(ValueError):
    """The backend does not support the model; the message is one sentence with the reason."""

    def __init__(self, architecture: str, reason: str) -> None:
        super().__init__(f"{architecture[:64]} does not run on the transformers backend: {reason}.")


def is_known_to_transformers(architecture: str) -> bool:
    """Whether the installed transformers has a causal language model of this name."""
    return any(architecture in names_of(value) for value in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())


def resolve(config: Mapping[str, Any]) -> tuple[PreTrainedConfig, type[PreTrainedModel]]:
    """Configuration and class for a config.json, with the attention of this backend.

    Raises:
        UnsupportedByTransformersError: The model is unknown, not a decoder, or has no pluggable attention.
    """
    architecture, model_config = _parsed(config, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, "causal language model")
    model_class: type[PreTrainedModel] = MODEL_FOR_CAUSAL_LM_MAPPING[type(model_config)]
    refusal = _why_refused(model_config, model_class)
    if refusal is not None:
        raise UnsupportedByTransformersError(architecture, refusal)
    register_attention()
    return model_config, model_class


def _parsed(config: Mapping[str, Any], type_to_names: Mapping[str, Any], kind: str) -> tuple[str, PreTrainedConfig]:
    """The class's name and the configuration of a model of a kind that the installed transformers has."""
    architecture = str((config.get("architectures") or ["?"])[0])
    model_type = str(config.get("model_type", ""))
    if architecture not in names_of(type_to_names.get(model_type, ())):
        is_known = any(architecture in names_of(value) for value in type_to_names.values())
        raise UnsupportedByTransformersError(architecture, why_unknown(config, model_type, kind, is_known=is_known))
    return architecture, parse_config(config, architecture, model_type)


def is_known_encoder_decoder(architecture: str) -> bool:
    """Whether the installed transformers has an encoder with a decoder of this name."""
    return any(architecture in names_of(value) for value in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES.values())


def resolve_encoder_decoder(config: Mapping[str, Any]) -> tuple[PreTrainedConfig, type[PreTrainedModel]]:
    """Configuration and class for the config.json of an encoder with a decoder, both of text.

    Raises:
        UnsupportedByTransformersError: The model is unknown, or not of text alone.
    """
    names = MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
    architecture, model_config = _parsed(config, names, "encoder with a decoder")
    model_class: type[PreTrainedModel] = MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING[type(model_config)]
    if not getattr(model_config, "is_encoder_decoder", False) or model_config.get_text_config() is not model_config:
        raise UnsupportedByTransformersError(architecture, "it is not an encoder of text with a decoder alone")
    if getattr(model_config, "attention_type", None) == "block_sparse":
        raise UnsupportedByTransformersError(architecture, "its attention picks tokens at random (block_sparse)")
    return model_config, model_class


def resolve_whole(config: Mapping[str, Any]) -> tuple[PreTrainedConfig, type[PreTrainedModel]]:
    """Configuration and class for the config.json of a model that takes pictures or sound.

    Raises:
        UnsupportedByTransformersError: The installed transformers does not know it.
    """
    architecture = str((config.get("architectures") or ["?"])[0])
    model_type = str(config.get("model_type", ""))
    for names, classes in _WHOLES:
        if architecture in names_of(names.get(model_type, ())):
            model_config = parse_config(config, architecture, model_type)
            model_class: type[PreTrainedModel] = classes[type(model_config)]
            return model_config, model_class
    reason = "the installed transformers has no model for pictures or sound of that name and model_type"
    raise UnsupportedByTransformersError(architecture, reason)


def max_model_len(config: PreTrainedConfig) -> int:
    """Number of positions that the model supports."""
    found = getattr(config, "max_position_embeddings", None)
    if not isinstance(found, int) or found <= 0:
        return _DEFAULT_MAX_MODEL_LEN
    return extended_positions({"rope_parameters": getattr(config, "rope_parameters", None)}, found)


def num_selected(config: PreTrainedConfig) -> int | None:
    """The number of tokens that an indexer selects of a longer context; None for a model without an indexer."""
    found = getattr(config, "index_topk", None)
    return found if isinstance(found, int) and found > 0 else None


def check_context(config: PreTrainedConfig, architecture: str, num_positions: int) -> None:
    """Raises if an indexer would select some of a request's tokens, or if its angles would depend on another request's.

    With LongRoPE they depend on the longest request of its batch.

    Dynamic NTK depends on it too, but only beyond `max_position_embeddings`, which no request exceeds.
    """
    selected = num_selected(config)
    if selected is not None and num_positions > selected:
        reason = f"its attention selects {selected} tokens of a context, so max_model_len must not exceed {selected}"
        raise UnsupportedByTransformersError(architecture, reason)
    rope = getattr(config, "rope_parameters", None)
    if not isinstance(rope, dict) or rope.get("rope_type") != "longrope":
        return
    original = rope.get("original_max_position_embeddings") or max_model_len(config)
    if num_positions > original:
        reason = (
            f"beyond {original} positions its LongRoPE turns every request by the longest one in the batch, so "
            f"max_model_len must not exceed {original}"
        )
        raise UnsupportedByTransformersError(architecture, reason)


def build_on_meta(
    config: PreTrainedConfig,
    model_class: type[PreTrainedModel],
    dtype: torch.dtype,
    attention: str | None = IMPLEMENTATION,
) -> PreTrainedModel:
    """The model on the meta device, from which names and shapes of weights are read.

    `attention`: Name of its attention; None for what transformers would choose.

    Raises:
        UnsupportedByTransformersError: The configuration's values make no model.
    """
    try:
        with torch.device("meta"):
            model: PreTrainedModel = model_class._from_config(config, dtype=dtype, attn_implementation=attention)
    except Exception as error:  # each model has its own checks and exceptions
        reason = f"its config.json makes no model, {type(error).__name__} {_first_line(error)}"
        if isinstance(error, KeyError) and error.args == (attention,):  # it looks the name up in a table of its own
            reason = _FIXED_ATTENTION
        raise UnsupportedByTransformersError(model_class.__name__, reason) from error
    return model


def names_of(value: str | tuple[str, ...]) -> tuple[str, ...]:
    """The classes of an entry of a table of transformers, which has one or several."""
    return (value,) if isinstance(value, str) else value


def parse_config(config: Mapping[str, Any], architecture: str, model_type: str) -> PreTrainedConfig:
    """The configuration of transformers for a config.json, without what chooses code.

    Raises:
        UnsupportedByTransformersError: Its class refuses the values.
    """
    fields = {name: value for name, value in config.items() if not name.startswith("_") and name not in _NOT_THE_MODELS}
    try:
        # Infinity and NaN have a form of their own in config.json.
        return CONFIG_MAPPING[model_type].from_dict(PreTrainedConfig._decode_special_floats(fields))
    except Exception as error:  # each configuration class has its own checks and exceptions
        reason = f"its config.json is refused, {_first_line(error)}"
        raise UnsupportedByTransformersError(architecture, reason) from error


def why_unknown(config: Mapping[str, Any], model_type: str, kind: str, *, is_known: bool) -> str:
    """The reason why a class cannot be found: `kind` is what it should be, `is_known` whether others have its name."""
    if config.get("is_encoder_decoder"):
        return "it is an encoder and a decoder, and only decoders are served"
    if config.get("auto_map"):
        return "it is made of code from its repository, which is never run"
    if is_known:
        return f"model_type {model_type[:64]!r} in its config.json belongs to another class"
    return f"the installed transformers has no {kind} of that name"


def _why_refused(config: PreTrainedConfig, model_class: type[PreTrainedModel]) -> str | None:
    if getattr(config, "is_encoder_decoder", False):
        return "it is an encoder and a decoder, and only decoders are served"
    text = config.get_text_config()
    if text is not config and getattr(text, "num_kv_shared_layers", 0) == getattr(text, "num_hidden_layers", None):
        return "its layers read the keys and values of another model"
    if text is not config:
        return "it has parts beside the text model"
    if getattr(model_class, "_is_stateful", False):
        return "its layers keep a state of their own beside keys and values"
    # The flag, or the table in the module, which some models use without the flag; the probe detects the rest.
    module = sys.modules[model_class.__module__]
    if not model_class._supports_attention_backend and not hasattr(module, "ALL_ATTENTION_FUNCTIONS"):
        return _FIXED_ATTENTION
    return None


def _first_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
