"""Reading of quantized checkpoints: one weight from the tensors of a layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch

from llmstack_kernels.linear import StoredWeight
from llmstack_model_runner.checkpoint_formats.bitsandbytes import BitsAndBytesReader
from llmstack_model_runner.checkpoint_formats.compressed_tensors import CompressedTensorsReader
from llmstack_model_runner.checkpoint_formats.config import CheckpointFormat
from llmstack_model_runner.checkpoint_formats.floats import FP8Reader, MXFP4Reader
from llmstack_model_runner.checkpoint_formats.integers import AWQReader, GPTQReader
from llmstack_model_runner.checkpoint_formats.layer_tensors import LayerTensors, Reader, UnreadWeight

_READERS: Mapping[str, Callable[[CheckpointFormat], Reader]] = {
    "fp8": FP8Reader,
    "compressed-tensors": CompressedTensorsReader,
    "awq": AWQReader,
    "gptq": GPTQReader,
    "bitsandbytes": BitsAndBytesReader,
    "mxfp4": MXFP4Reader,
}


def read_quantized(
    checkpoint: CheckpointFormat, names: list[str], read: Callable[[str], torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor | UnreadWeight]]:
    """Each layer's weight under its name in full precision, as soon as its first tensor's turn comes; other tensors.

    A weight that is not asked for is not read.

    The tensors of a layer show whether it is quantized. So layers that the configuration leaves out need no rules.

    Raises:
        ValueError: A tensor is missing or does not fit, a scale is no finite number, or no layer is quantized.
    """
    reader = _READERS[checkpoint.method](checkpoint)
    has_stacks = isinstance(reader, MXFP4Reader)
    found = {_layer_name(name) if has_stacks else name: name for name in names}
    layers = {layer for name in found for layer in _layers_of(name, reader.markers)}
    if not layers:
        raise ValueError(f"config.json: {checkpoint.field} says {checkpoint.method}, and no weight is quantized.")
    done: set[str] = set()
    for name in found:
        layer = next((layer for layer in _layers_of(name, reader.suffixes) if layer in layers), None)
        if layer is None:
            yield name, read(found[name])
        elif layer not in done:
            done.add(layer)
            yield f"{layer}.weight", UnreadWeight(partial(_read_layer, layer, reader, found, read))


def _layers_of(name: str, suffixes: frozenset[str]) -> Iterator[str]:
    for suffix in suffixes:
        if name.endswith(f".{suffix}"):
            yield name[: -len(suffix) - 1]


def _read_layer(
    layer: str, reader: Reader, names: Mapping[str, str], read: Callable[[str], torch.Tensor]
) -> StoredWeight:
    suffixes = frozenset(suffix for suffix in reader.suffixes if f"{layer}.{suffix}" in names)
    try:
        with torch.inference_mode():
            return reader(LayerTensors(suffixes, lambda suffix: read(names[f"{layer}.{suffix}"])))
    except ValueError as error:
        raise ValueError(
            f"{layer[:128]} cannot be read as {type(reader).__name__.removesuffix('Reader')}: {error}"
        ) from None


def _layer_name(name: str) -> str:
    """A tensor's name as single layers have it: `down_proj_blocks`, of all experts, is `down_proj.weight_blocks`."""
    for ending in ("_blocks", "_scales"):
        if name.endswith(f"_proj{ending}"):
            return f"{name.removesuffix(ending)}.weight{ending}"
    return name
