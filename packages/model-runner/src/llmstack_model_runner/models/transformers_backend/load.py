"""Loading of mapped weights into a model of transformers, without copies."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from llmstack_model_runner.models.base import raise_on_mismatch
from llmstack_model_runner.models.transformers_backend.attention import PROBE_IMPLEMENTATION
from llmstack_model_runner.models.transformers_backend.resolve import build_on_meta
from llmstack_model_runner.models.transformers_backend.stored import Weight, plan_stored_layers


def load_model(
    config: PreTrainedConfig,
    model_class: type[PreTrainedModel],
    weights: Iterable[tuple[str, Weight]],
    dtype: torch.dtype,
    device: torch.device,
    attention: str | None = PROBE_IMPLEMENTATION,
) -> PreTrainedModel:
    """The model with `weights`, renamed and joined as transformers does for checkpoints of its family.

    `attention`: Name of its attention; None for what transformers would choose.

    Those of quantized checkpoints stay as they are stored, where the layer that has them can compute with that.

    Raises:
        ValueError: Tensors are missing, unexpected, duplicated or of a wrong shape; the message names them.
    """
    given: dict[str, Weight] = {}
    doubled = []
    for name, weight in weights:
        if name in given:
            doubled.append(name)
        given[name] = weight
    stored = plan_stored_layers(build_on_meta(config, model_class, dtype, attention), given, dtype)
    try:
        with _quiet():
            model, found = stored.class_without_weights(model_class).from_pretrained(
                None,
                config=config,
                state_dict=stored.plain,
                dtype=dtype,
                attn_implementation=attention,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # `found` has the names for an error of one sentence
                local_files_only=True,
            )
    except RuntimeError as error:  # raised while tensors are joined; its message names none of them
        raise ValueError(
            "The weights do not fit the configuration: tensors that transformers joins are missing or of a wrong shape."
        ) from error
    loaded: PreTrainedModel = model.to(device)
    misshapen = [f"{name} {list(is_)} instead of {list(wanted)}" for name, is_, wanted in found["mismatched_keys"]]
    raise_on_mismatch(
        missing=sorted(found["missing_keys"]),
        unused=sorted(found["unexpected_keys"]),
        doubled=doubled,
        misshapen=misshapen or stored.fill(loaded, dtype, device),
    )
    return loaded


def release_files(model: nn.Module) -> None:
    """Copies the remaining tensors, since keeping one would keep the whole mapped file."""
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.clone()


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppresses transformers' progress bars and tables on standard error."""
    verbosity = transformers_logging.get_verbosity()
    has_bar = bool(transformers_logging.is_progress_bar_enabled())
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if has_bar:
            transformers_logging.enable_progress_bar()


def describe_version() -> str:
    """Such as `transformers 5.17.0`."""
    import transformers

    return f"transformers {transformers.__version__}"
