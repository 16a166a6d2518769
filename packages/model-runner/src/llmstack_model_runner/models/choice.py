"""Choice between native modelling code and that of transformers."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import torch

from llmstack_model_files import TEXT_PART_OF
from llmstack_model_runner.architectures import is_supported
from llmstack_model_runner.device.errors import allocation
from llmstack_model_runner.layers.rotary import UnsupportedVariantError
from llmstack_model_runner.layers.sharding import Sharding
from llmstack_model_runner.lean_torch import import_parts
from llmstack_model_runner.models import load_model_class
from llmstack_model_runner.models.base import CausalLM, Model
from llmstack_model_runner.models.image_files import IMAGE_FILES
from llmstack_model_runner.models.text_part import make_text_part
from llmstack_types.vocabulary import ModelImpl, words_of

logger = logging.getLogger(__name__)

_INSTALL = "pip install 'llmstack-model-runner[transformers]'"


def choose_model_class(architecture: str, model_impl: str = "auto") -> type[Model]:
    """The class for an entry of `architectures` in a config.json.

    `auto` prefers native code and uses transformers for other architectures. transformers is imported only if it runs
    the model.

    Raises:
        ValueError: The architecture is not supported, or transformers is needed and not installed.
    """
    if model_impl not in words_of(ModelImpl):
        raise ValueError(f"model_impl {model_impl[:64]!r} is unknown; {', '.join(words_of(ModelImpl))} are known.")
    if model_impl == "llmstack" or (model_impl == "auto" and is_supported(architecture)):
        return load_model_class(architecture)
    import_parts()  # transformers may need any of them
    has_transformers = find_spec("transformers") is not None
    if model_impl == "transformers":
        if not has_transformers:
            raise ValueError(f"model_impl transformers needs the package transformers: {_INSTALL}.")
        return _transformers_model(architecture)
    if has_transformers and _is_known_to_transformers(architecture):
        return _transformers_model(architecture)
    try:
        return load_model_class(architecture)
    except ValueError as error:
        found = "does not know it either" if has_transformers else f"may, but is not installed: {_INSTALL}"
        raise ValueError(f"{error} The package transformers {found}.") from None


def make_model(
    architecture: str,
    model_impl: str,
    arguments: tuple[Mapping[str, Any], torch.dtype, torch.device],
    own: Sharding,
) -> Model:
    """A model of the chosen class; with `auto`, of transformers' code if the chosen one lacks the model's variant.

    `arguments`: The arguments of the class.

    Raises:
        ValueError: Neither supports the model.
        EngineStartError: The model is too large even without its weights.
    """

    def make(model_class: type[Model]) -> Model:
        if arguments[0].get(TEXT_PART_OF):
            model_class = _of_whole(model_class, arguments[0])
        check_can_be_sharded(model_class, own, architecture, arguments[-1])
        with allocation("the sizes in config.json do not fit on the device", "use a smaller model"):
            return model_class(*arguments)

    try:
        return make(choose_model_class(architecture, model_impl))
    except UnsupportedVariantError as error:
        if model_impl != "auto" or find_spec("transformers") is None or not _is_known_to_transformers(architecture):
            raise
        logger.warning("%s: llmstack's code lacks this variant, so that of transformers runs (%s)", architecture, error)
    return make(_transformers_model(architecture))


def _of_whole(model_class: type[Model], config: Mapping[str, Any]) -> type[Model]:
    if not config.get(IMAGE_FILES):
        return make_text_part(model_class)
    from llmstack_model_runner.models.picture_model import make_picture_model  # late, since it imports Pillow

    return make_picture_model(model_class, config)


def check_can_be_sharded(model_class: type[Model], own: Sharding, architecture: str, device: torch.device) -> None:
    """Refuses models that several ranks cannot compute together.

    Raises:
        ValueError: Names the model and the sizes.
    """
    sizes = f"tensor_parallel_size {own.size} and pipeline_parallel_size {own.num_stages}"
    if own.is_whole:
        return
    if not model_class.can_be_sharded:
        raise ValueError(
            f"{architecture} with {sizes}: only models with native code and an output head can be split, not "
            f"encoders or {model_class.implementation} code; use size 1"
        )
    if own.num_stages > 1 and not issubclass(model_class, CausalLM):
        raise ValueError(f"{architecture} with {sizes}: pooling models have one stage; use pipeline_parallel_size 1")
    if own.num_stages > 1 and device.type != "cpu":
        raise ValueError(f"{sizes}: pipeline stages run on CPUs only; use tensor_parallel_size on GPUs")


def _transformers_model(architecture: str) -> type[Model]:
    """The class for a name: a decoder, unless transformers has an encoder or a classifier of that name, or both."""
    from llmstack_model_runner.models.transformers_backend.encoder_classes import is_known_encoder, labels_of
    from llmstack_model_runner.models.transformers_backend.resolve import (
        is_known_encoder_decoder,
        is_known_to_transformers,
    )

    if is_known_encoder_decoder(architecture):
        from llmstack_model_runner.models.transformers_backend.encoder_decoder import TransformersEncoderDecoder

        return TransformersEncoderDecoder
    if is_known_to_transformers(architecture) or not is_known_encoder(architecture):
        from llmstack_model_runner.models.transformers_backend.model import TransformersModel

        return TransformersModel
    if labels_of(architecture):
        from llmstack_model_runner.models.transformers_backend.encoder_labels import TransformersClassifier

        return TransformersClassifier
    from llmstack_model_runner.models.transformers_backend.encoder import TransformersTextEncoder

    return TransformersTextEncoder


def _is_known_to_transformers(architecture: str) -> bool:
    from llmstack_model_runner.models.transformers_backend.encoder_classes import is_known_encoder
    from llmstack_model_runner.models.transformers_backend.resolve import (
        is_known_encoder_decoder,
        is_known_to_transformers,
    )

    known = (is_known_to_transformers, is_known_encoder_decoder, is_known_encoder)
    return any(is_known(architecture) for is_known in known)
