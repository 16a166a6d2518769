"""Classes of transformers for encoders of text, and for their heads."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import transformers
from torch import nn
from transformers import MODEL_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
    MODEL_MAPPING_NAMES,
)

from llmstack_model_runner.models.transformers_backend.resolve import (
    UnsupportedByTransformersError,
    names_of,
    parse_config,
    why_unknown,
)

Labels = Literal["", "prompt", "token"]
"""What labels are of: a whole prompt, each token, or nothing."""

_VECTORS = (MODEL_MAPPING_NAMES, MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES)
_OF_LABELS: Mapping[Labels, Mapping[str, Any]] = {
    "prompt": MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    "token": MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
}
_TABLES = (*_VECTORS, MODEL_FOR_MASKED_LM_MAPPING_NAMES, *_OF_LABELS.values())


@dataclass(frozen=True, slots=True)
class EncoderClass:
    """The class for a config.json.

    Attributes:
        model_class: It has no pooler, where its constructor allows that, unless there are labels.
        labels: What a head of it labels.
        has_own_attention: Whether its attention cannot be replaced.
    """

    config: PreTrainedConfig
    model_class: type[PreTrainedModel]
    labels: Labels

    @property
    def has_own_attention(self) -> bool:
        # The flag, or the table in the module, which some models use without the flag; the probe detects the rest.
        module = sys.modules[self.model_class.__module__]
        return not (self.model_class._supports_attention_backend or hasattr(module, "ALL_ATTENTION_FUNCTIONS"))


def is_known_encoder(architecture: str) -> bool:
    """Whether the installed transformers has a class of this name that may be an encoder of text or its classifier."""
    return any(architecture in names_of(value) for table in _TABLES for value in table.values())


def labels_of(architecture: str) -> Labels:
    """The kind of labels of the head of a class with this name."""
    is_of = (kind for kind, table in _OF_LABELS.items() if any(architecture in names_of(x) for x in table.values()))
    return next(is_of, "")


def resolve_encoder(config: Mapping[str, Any]) -> EncoderClass:
    """The class for a config.json.

    Raises:
        UnsupportedByTransformersError: The installed transformers does not have it, or it is no encoder alone.
    """
    architecture = str((config.get("architectures") or ["?"])[0])
    model_type = str(config.get("model_type", ""))
    if not any(architecture in names_of(table.get(model_type, ())) for table in _TABLES):
        known = is_known_encoder(architecture)
        raise UnsupportedByTransformersError(architecture, why_unknown(config, model_type, "encoder", is_known=known))
    parsed = parse_config(config, architecture, model_type)
    model_class = _class_of(parsed, architecture, model_type)
    labels = labels_of(architecture)
    if getattr(parsed, "is_encoder_decoder", False) and not architecture.endswith("EncoderModel"):
        reason = "it is an encoder and a decoder; of these only the encoder is served, as the class T5EncoderModel is"
        raise UnsupportedByTransformersError(architecture, reason)
    if parsed.get_text_config() is not parsed:
        raise UnsupportedByTransformersError(architecture, "it has parts beside the text model")
    if getattr(parsed, "attention_type", None) == "block_sparse":
        reason = "its attention picks tokens at random (attention_type block_sparse)"
        raise UnsupportedByTransformersError(architecture, reason)
    parsed.use_cache = False
    return EncoderClass(parsed, model_class if labels else _without_pooler(model_class), labels)


def encoder_part(model: PreTrainedModel) -> nn.Module:
    """The part of a classifier before its head; the model itself where it has none."""
    part: nn.Module = model.base_model
    return part


def first_position(model: nn.Module) -> int:
    """The position of a prompt's first token: behind that of the padding in models with RoBERTa's table."""
    return max((table.padding_idx + 1 for table in _position_tables(model) if table.padding_idx is not None), default=0)


def num_table_positions(model: nn.Module) -> int | None:
    """The tokens that a table of positions has rows for; None without one."""
    first = first_position(model)
    return min((table.num_embeddings - first for table in _position_tables(model)), default=None)


def _position_tables(model: nn.Module) -> Iterator[nn.Embedding]:
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and name.endswith("position_embeddings"):
            yield module


def _class_of(config: PreTrainedConfig, architecture: str, model_type: str) -> type[PreTrainedModel]:
    """The class; of a masked language model that of its encoder, since nothing needs its head."""
    is_masked = architecture in names_of(MODEL_FOR_MASKED_LM_MAPPING_NAMES.get(model_type, ()))
    found: type[PreTrainedModel] = MODEL_MAPPING[type(config)] if is_masked else getattr(transformers, architecture)
    return found


def _without_pooler(model_class: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """The class without the layer behind the first token, whose output no vector is made of."""
    if "add_pooling_layer" not in inspect.signature(model_class.__init__).parameters:
        return model_class

    class WithoutPooler(model_class):  # type: ignore[misc]  # the class is known when it is loaded
        def __init__(self, config: Any, *args: Any, **options: Any) -> None:
            super().__init__(config, *args, **{**options, "add_pooling_layer": False})

    # Tables of transformers have names by class, and leave out classes of other packages.
    WithoutPooler.__name__, WithoutPooler.__module__ = model_class.__name__, model_class.__module__
    return WithoutPooler
