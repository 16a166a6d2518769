"""Loading of weights from a folder, with checks before files are mapped."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from llmstack_model_files import (
    check_safetensors,
    gguf_weights,
    has_own_names,
    read_ahead,
    read_json,
    safetensors_files,
)
from llmstack_model_runner.checkpoint_formats.config import CheckpointFormat
from llmstack_model_runner.checkpoint_formats.layer_tensors import UnreadWeight
from llmstack_model_runner.checkpoint_formats.mistral import MistralForm
from llmstack_model_runner.device.host_limits import available_memory_bytes
from llmstack_model_runner.layers.packing import PackedWeights, packed_linears
from llmstack_model_runner.layers.weight_slot import FileTensor, WeightPart, WeightSlot
from llmstack_model_runner.models.base import Loadable, SlotFilling
from llmstack_model_runner.packed_files import SHARE_OF_MEMORY
from llmstack_model_runner.progress_bar import with_progress
from llmstack_model_runner.weights.dummy import dummy_weights
from llmstack_types.vocabulary import LoadFormat, words_of

logger = logging.getLogger(__name__)


def load_weights(
    model: Loadable,
    model_path: str | Path,
    load_format: str = "auto",
    dtype: torch.dtype | None = None,
    seed: int = 0,
    quantization: str | None = None,
    device: torch.device | None = None,
    is_batch_invariant: bool = False,
    checkpoint_format: CheckpointFormat | None = None,
    packed: PackedWeights | None = None,
) -> None:
    """Loads all weights of `model` and makes it ready to run.

    Files are mapped and not read into memory. Each layer converts its tensors to its own type, so `dtype` is only
    logged. The format `dummy` needs no files; equal seeds give equal weights, generated on `device`. With a
    `quantization`, each linear layer is quantized and drops its tensors as soon as it has all of them. Layers that are
    `is_batch_invariant` give a row the same bits in any number of rows. Weights of a quantized checkpoint, described by
    `checkpoint_format`, are kept as they are, and `int8_dynamic` and `int4_dynamic` round their inputs alone. Dummy
    weights are in full precision. Layers that are in `packed` are not read.

    Raises:
        ValueError: The format is unknown, or tensors are missing, unexpected or of a wrong shape.
        llmstack_model_files.ModelFilesError: There are no weights, or a file is damaged.
    """
    started_s = time.perf_counter()
    is_stored = checkpoint_format is not None
    rounding = None if is_stored else quantization
    input_rounding = quantization if is_stored else None
    with packed_linears(rounding, is_batch_invariant, input_rounding, packed):
        weights = _weights(model, Path(model_path), load_format, seed, device, checkpoint_format, packed)
        model.load_weights(with_progress("load and pack weights", weights, len(model.slots())))
        model.finish_loading()
    scheme = quantization if checkpoint_format is None else checkpoint_format.method
    kind = f"{dtype or 'own type'}{', ' + scheme if scheme else ''}"
    logger.info("weights loaded in %.2f s (%s, %s)", time.perf_counter() - started_s, load_format, kind)


def read_without_keeping(model: Loadable, folder: str | Path) -> None:
    """Reads the weights of a folder as `load_weights` does, and keeps none: the model stays as it is.

    Raises:
        ValueError: Tensors are missing, of a wrong shape, quantized, or not finite.
        llmstack_model_files.ModelFilesError: There are no weights, or a file is damaged.
    """
    slots, optional = (
        {name: _read_only(slot) for name, slot in found.items()} for found in (model.slots(), model.optional_slots())
    )
    filling = SlotFilling(model, slots, optional)
    for name, weight in _weights(model, Path(folder), "auto", 0, None, None, None):
        filling.take(name, weight)
    filling.finish()


def _read_only(slot: WeightSlot) -> WeightSlot:
    return replace(slot, load=lambda tensor: None, load_stored=None, load_table=None, skip=None)


def _weights(
    model: Loadable,
    model_path: Path,
    load_format: str,
    seed: int,
    device: torch.device | None,
    checkpoint_format: CheckpointFormat | None,
    packed: PackedWeights | None,
) -> Iterator[tuple[str, torch.Tensor | FileTensor | UnreadWeight]]:
    if load_format == "dummy":
        return dummy_weights(model.slots(), seed, device)
    if load_format in words_of(LoadFormat):
        files = gguf_weights(model_path)
        if files:
            from llmstack_model_runner.checkpoint_formats.gguf import read_gguf

            return read_gguf(files, model.kv_spec.head_dim)
        paths = safetensors_files(model_path)
        if packed is None or not packed.is_hit:
            read_ahead(paths, (available_memory_bytes() or 0) // SHARE_OF_MEMORY)
        form = MistralForm.of(read_json(model_path, "config.json")) if has_own_names(model_path) else None
        if checkpoint_format is None:
            return _read_safetensors(paths, form)
        return _read_quantized(paths, checkpoint_format, form)
    *others, last = words_of(LoadFormat)
    raise ValueError(f"load format {load_format[:64]!r} is unknown; {', '.join(others)} and {last} are known.")


class _FileTensor:
    """A tensor of a safetensors file, of which only what is asked for is read."""

    def __init__(self, file: Any, name: str, order: Callable[[torch.Tensor], torch.Tensor] | None = None) -> None:
        """`file`: Of `safe_open`, which has no types. `order`: Puts the rows into the order that is read."""
        self._file, self._name, self._order = file, name, order

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self._file.get_slice(self._name).get_shape())

    def read(self, part: WeightPart | None) -> torch.Tensor:
        if self._order is not None:  # a part's rows may be anywhere
            whole = self._order(self._file.get_tensor(self._name))
            return whole if part is None else part.read(whole)
        tensor: torch.Tensor = (
            self._file.get_tensor(self._name) if part is None else part.read(self._file.get_slice(self._name))
        )
        return tensor


def _read_safetensors(paths: list[Path], form: MistralForm | None) -> Iterator[tuple[str, FileTensor]]:
    for path in paths:
        check_safetensors(path)
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - safe_open is no mapping
                    if form is None:
                        yield name, _FileTensor(file, name)
                    else:
                        yield form.name(name), _FileTensor(file, name, form.order(name))
        except SafetensorError as error:
            raise ValueError(f"{path.name} cannot be read as safetensors.") from error


def _read_quantized(
    paths: list[Path], checkpoint_format: CheckpointFormat, form: MistralForm | None
) -> Iterator[tuple[str, torch.Tensor | UnreadWeight]]:
    """As `_read_safetensors`, with one weight for the tensors of each quantized layer, which several files may have."""
    from llmstack_model_runner.checkpoint_formats.read import read_quantized

    name_to_tensor: dict[str, Callable[[], torch.Tensor]] = {}
    for path in paths:
        check_safetensors(path)
        try:
            file: Any = safe_open(path, framework="pt")  # open until no unread weight is left that has it
        except SafetensorError as error:
            raise ValueError(f"{path.name} cannot be read as safetensors.") from error
        for name in file.keys():  # noqa: SIM118 - safe_open is no mapping
            known = name if form is None else form.name(name)
            if known in name_to_tensor:
                raise ValueError(f"{path.name}: the tensor {name[:128]} is in another file too.")
            tensor = _FileTensor(file, name, None if form is None else form.order(name))
            name_to_tensor[known] = partial(tensor.read, None)
    yield from read_quantized(checkpoint_format, [*name_to_tensor], lambda name: name_to_tensor[name]())
