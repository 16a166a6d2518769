"""Loading of mapped weights into a model of transformers, without copies."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.utils import logging as transformers_logging

from llmstack_model_runner.layers.packing import pack
from llmstack_model_runner.models.base import raise_on_mismatch
from llmstack_model_runner.models.transformers_backend.attention import PROBE_IMPLEMENTATION


def load_model(
    config: PreTrainedConfig,
    model_class: type[PreTrainedModel],
    weights: Iterable[tuple[str, torch.Tensor]],
    dtype: torch.dtype,
    device: torch.device,
) -> PreTrainedModel:
    """The model with `weights`, renamed and joined as transformers does for checkpoints of its family.

    Raises:
        ValueError: Tensors are missing, unexpected, duplicated or of a wrong shape; the message names them.
    """
    state_dict: dict[str, torch.Tensor] = {}
    doubled = []
    for name, tensor in weights:
        if name in state_dict:
            doubled.append(name)
        state_dict[name] = tensor
    try:
        with _quiet():
            model, found = model_class.from_pretrained(
                None,
                config=config,
                state_dict=state_dict,
                dtype=dtype,
                attn_implementation=PROBE_IMPLEMENTATION,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # `found` has the names for an error of one sentence
                local_files_only=True,
            )
    except RuntimeError as error:  # raised while tensors are joined; its message names none of them
        raise ValueError(
            "The weights do not fit the configuration: tensors that transformers joins are missing or of a wrong shape."
        ) from error
    raise_on_mismatch(
        missing=sorted(found["missing_keys"]),
        unused=sorted(found["unexpected_keys"]),
        doubled=doubled,
        misshapen=[f"{name} {list(is_)} instead of {list(wanted)}" for name, is_, wanted in found["mismatched_keys"]],
    )
    loaded: PreTrainedModel = model.to(device)
    return loaded


def pack_linears(model: nn.Module) -> None:
    """Replaces linear layers by packed ones one at a time, so that at most one layer has two copies."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            # Subclasses may compute something else.
            if type(child) is nn.Linear or type(child) is Conv1D:
                setattr(parent, name, _PackedLinear(child))


def release_files(model: nn.Module) -> None:
    """Copies the remaining tensors, since keeping one would keep the whole mapped file."""
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.clone()


class _PackedLinear(nn.Module):
    """A linear layer whose weight only the packed product can read.

    `weight` has the layer's shape and type, for code that reads them, and is filled with NaN, so that the probe detects
    code that computes with it.
    """

    def __init__(self, layer: nn.Linear | Conv1D) -> None:
        super().__init__()
        weight: torch.Tensor = layer.weight.detach()
        self.weight = torch.full((), torch.nan, dtype=weight.dtype, device=weight.device).expand(weight.shape)
        self.bias = layer.bias
        if isinstance(layer, Conv1D):
            weight = weight.t()
        self.out_features, self.in_features = weight.shape
        # A copy, since the packed layer would keep the tensor and with it the mapped file.
        self._packed = pack(weight, None if layer.bias is None else layer.bias.detach().clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._packed(x)


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
