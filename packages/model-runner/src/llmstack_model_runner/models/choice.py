"""Chooses whose code runs an architecture: ours, or that of transformers over our KV storage."""

from __future__ import annotations

from importlib.util import find_spec

from llmstack_model_runner.models import load_model_class, supported_architectures
from llmstack_model_runner.models.base import Model

MODEL_IMPLS = ("auto", "llmstack", "transformers")
_INSTALL = "pip install 'llmstack-model-runner[transformers]'"


def choose_model_class(architecture: str, model_impl: str = "auto") -> type[Model]:
    """The class for an entry of `architectures` in a config.json; transformers is imported only if it is to run.

    `auto` takes ours where there is one and transformers' for everything else that it knows.

    Raises:
        ValueError: Nobody knows the architecture, or transformers is needed and not installed.
    """
    if model_impl not in MODEL_IMPLS:
        raise ValueError(f"model_impl {model_impl[:64]!r} is unknown; {', '.join(MODEL_IMPLS)} are known.")
    if model_impl == "llmstack" or (model_impl == "auto" and architecture in supported_architectures()):
        return load_model_class(architecture)
    has_transformers = find_spec("transformers") is not None
    if model_impl == "transformers":
        if not has_transformers:
            raise ValueError(f"model_impl transformers needs the package transformers: {_INSTALL}.")
        return _transformers_model()
    if has_transformers and _is_known_to_transformers(architecture):
        return _transformers_model()
    try:
        return load_model_class(architecture)
    except ValueError as error:
        found = "does not know it either" if has_transformers else f"may, but is not installed: {_INSTALL}"
        raise ValueError(f"{error} The package transformers {found}.") from None


def _transformers_model() -> type[Model]:
    from llmstack_model_runner.models.transformers_backend.model import TransformersModel

    return TransformersModel


def _is_known_to_transformers(architecture: str) -> bool:
    from llmstack_model_runner.models.transformers_backend.resolve import is_known_to_transformers

    return is_known_to_transformers(architecture)
