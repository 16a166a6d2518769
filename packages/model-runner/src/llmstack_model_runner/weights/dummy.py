"""Dummy weights: correct shapes and reproducible values without a file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from llmstack_model_runner.layers.weight_slot import WeightKind, WeightSlot

_STANDARD_DEVIATION = 0.02
# Values are slices of one buffer of this many normal numbers, since drawing 124 million takes a second on one core. The
# length is prime, so that the rows of a table start at different places.
_BUFFER_SIZE = 4_194_301


def dummy_weights(
    slots: Mapping[str, WeightSlot], seed: int, device: torch.device | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """A tensor for each slot: normal matrices and biases, scales near 1; equal for equal seeds, on any device.

    They are expanded on `device` (the CPU by default), so that only the random numbers are copied: 16 MB, not 32 GB.
    """
    generator = torch.Generator().manual_seed(seed)
    buffer = (torch.randn(_BUFFER_SIZE, generator=generator) * _STANDARD_DEVIATION).to(device)
    offset = 0
    for name, slot in slots.items():
        size = torch.Size(slot.shape).numel()
        tensor = _cyclic_slice(buffer, offset, size).view(slot.shape)
        if tensor.device.type != "cpu":
            # A copy, since layers that all read one buffer would read from a GPU's cache.
            tensor = tensor.clone()
        offset = (offset + size) % _BUFFER_SIZE
        yield name, tensor + 1 if slot.kind is WeightKind.SCALE else tensor


def _cyclic_slice(buffer: torch.Tensor, offset: int, size: int) -> torch.Tensor:
    if offset + size <= len(buffer):
        return buffer[offset : offset + size]
    num_whole, num_rest = divmod(size - (len(buffer) - offset), len(buffer))
    return torch.cat([buffer[offset:], *([buffer] * num_whole), buffer[:num_rest]])
