"""Models: a closed table of architectures, which installed packages may extend."""

from __future__ import annotations

import importlib
import logging
from importlib.metadata import EntryPoint
from typing import Any

from llmstack_model_runner.architectures import (
    ARCHITECTURES,
    ENCODERS,
    ENTRY_POINT_GROUP,
    OLD_GROUP,
    POOLING_DECODERS,
    installed_architectures,
    supported_architectures,
)
from llmstack_model_runner.lean_torch import import_parts
from llmstack_model_runner.models.base import CausalLM, Classifier, Encoder, Model
from llmstack_model_runner.models.kv_spec import ModelKVSpec

__all__ = [
    "ENTRY_POINT_GROUP",
    "CausalLM",
    "Classifier",
    "Encoder",
    "Model",
    "ModelKVSpec",
    "load_model_class",
    "supported_architectures",
]

logger = logging.getLogger(__name__)


def load_model_class(architecture: str) -> type[Model]:
    """The class for an entry of `architectures` in a config.json.

    Raises:
        ValueError: The architecture is not supported; the message lists those that are.
    """
    if architecture in POOLING_DECODERS:
        return _load_pooling_decoder(*POOLING_DECODERS[architecture])
    target = ARCHITECTURES.get(architecture) or ENCODERS.get(architecture)
    if target is None:
        entry = installed_architectures().get(architecture)
        if entry is not None:
            return _load_installed(entry)
        raise ValueError(
            f"Model architecture {architecture[:64]!r} is not supported; "
            f"supported are {', '.join(supported_architectures())}."
        )
    model_class: type[Model] = _import(target)
    return model_class


def _load_installed(entry: EntryPoint) -> type[Model]:
    if entry.group == OLD_GROUP:
        logger.warning(
            "architecture %s: the entry point group %s is deprecated and is not read from 0.3 on; use %s",
            entry.name, OLD_GROUP, ENTRY_POINT_GROUP,
        )  # fmt: skip
    import_parts()
    loaded: type[Model] = entry.load()
    return loaded


def _load_pooling_decoder(decoder: str, base: str) -> type[Model]:
    from llmstack_model_runner.models import pooling_decoder

    return pooling_decoder.make_pooling_decoder(_import(ARCHITECTURES[decoder]), getattr(pooling_decoder, base))


def _import(target: str) -> Any:
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)
