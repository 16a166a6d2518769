"""GPTQ and AWQ: integers packed into words, with scales and zero points."""

from __future__ import annotations

from typing import ClassVar

import torch

from llmstack_kernels.linear import StoredWeight
from llmstack_model_runner.checkpoint_formats.config import CheckpointFormat
from llmstack_model_runner.checkpoint_formats.layer_tensors import (
    LayerTensors,
    group_size_of,
    require_matrix,
    require_shape,
    runs_of_groups,
    unpack_last,
)

_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Places of the first to eighth column in a word of AWQ, in units of four bits."""


class GPTQReader:
    """`qweight` [inputs / numbers per word, outputs], `qzeros` [groups, outputs / numbers per word], `scales`.

    `g_idx` names the group of each input, which `desc_act` spreads. In format `gptq`, zero points are stored less 1,
    by one subtraction from whole words; in `gptq_v2` they are stored as they are.
    """

    markers: ClassVar[frozenset[str]] = frozenset({"qweight"})
    suffixes: ClassVar[frozenset[str]] = frozenset({"qweight", "qzeros", "scales", "g_idx"})

    def __init__(self, checkpoint: CheckpointFormat) -> None:
        self._bits = checkpoint.num_bits
        self._group_size = checkpoint.config.get("group_size")
        self._is_less_one = (checkpoint.config.get("checkpoint_format") or "gptq") == "gptq"

    def __call__(self, layer: LayerTensors) -> StoredWeight:
        per_word = 32 // self._bits
        words = layer.get("qweight", torch.int32)
        num_rows, num_outputs = require_matrix("qweight", words)
        num_inputs = num_rows * per_word
        scales = layer.get_scales("scales")
        num_groups, _ = require_matrix("scales", scales)
        require_shape("scales", scales, num_groups, num_outputs)
        zeros = layer.get("qzeros", torch.int32)
        require_shape("qzeros", zeros, num_groups, -(-num_outputs // per_word))
        if self._is_less_one:
            zeros = zeros + sum(1 << shift for shift in range(0, 32, self._bits))  # wraps, as the subtraction did
        size = group_size_of(num_inputs, num_groups, self._group_size)
        numbers = unpack_last(words.t().contiguous(), self._bits)
        order = None
        if "g_idx" in layer:
            order = runs_of_groups(layer.get("g_idx", torch.int32, torch.int64), num_inputs, size)
        return StoredWeight(
            "int4" if self._bits == 4 else "int8",
            numbers if order is None else numbers[:, order],
            scales.t().contiguous(),
            size,
            unpack_last(zeros, self._bits)[:, :num_outputs].t().contiguous(),
            order=order,
        )


class AWQReader:
    """`qweight` [inputs, outputs / 8] and `qzeros` [groups, outputs / 8] in an order of their own, and `scales`."""

    markers: ClassVar[frozenset[str]] = frozenset({"qweight"})
    suffixes: ClassVar[frozenset[str]] = frozenset({"qweight", "qzeros", "scales"})

    def __init__(self, checkpoint: CheckpointFormat) -> None:
        size = checkpoint.config.get("group_size")
        self._group_size = checkpoint.config.get("q_group_size") if size is None else size

    def __call__(self, layer: LayerTensors) -> StoredWeight:
        words = layer.get("qweight", torch.int32)
        num_inputs, num_words = require_matrix("qweight", words)
        scales = layer.get_scales("scales")
        num_groups, _ = require_matrix("scales", scales)
        require_shape("scales", scales, num_groups, 8 * num_words)
        zeros = require_shape("qzeros", layer.get("qzeros", torch.int32), num_groups, num_words)
        size = group_size_of(num_inputs, num_groups, self._group_size)
        return StoredWeight("int4", _awq_columns(words), scales.t().contiguous(), size, _awq_columns(zeros))


def _awq_columns(words: torch.Tensor) -> torch.Tensor:
    """[n, words] to uint8 [8 * words, n]."""
    numbers = unpack_last(words, 4).view(*words.shape, 8)[..., list(_AWQ_PLACES)]
    return numbers.flatten(-2).t().contiguous()
