"""GPTQ and AWQ: integers packed into words, with scales and zero points."""

from __future__ import annotations

from typing import ClassVar

import torch

from llmstack_kernels.linear import StoredWeight
from llmstack_model_runner.checkpoint_formats.config import CheckpointFormat, gptq_rules
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
    by one subtraction from whole words; in `gptq_v2` they are stored as they are. Where the configuration has several
    numbers of bits or group sizes (`dynamic`), the shapes of a layer's tensors show which it has.
    """

    markers: ClassVar[frozenset[str]] = frozenset({"qweight"})
    suffixes: ClassVar[frozenset[str]] = frozenset({"qweight", "qzeros", "scales", "g_idx"})

    def __init__(self, checkpoint: CheckpointFormat) -> None:
        config = checkpoint.config
        rules = gptq_rules(config)
        self._bits = [int(given["bits"]) for given in (config, *rules) if given.get("bits")]
        self._group_sizes = [given.get("group_size") for given in (config, *rules)]
        self._is_less_one = (config.get("checkpoint_format") or "gptq") == "gptq"

    def __call__(self, layer: LayerTensors) -> StoredWeight:
        words = layer.get("qweight", torch.int32)
        num_rows, num_outputs = require_matrix("qweight", words)
        scales = layer.get_scales("scales")
        num_groups, _ = require_matrix("scales", scales)
        require_shape("scales", scales, num_groups, num_outputs)
        zeros = layer.get("qzeros", torch.int32)
        widths = {-(-num_outputs * bits // 32): bits for bits in reversed(self._bits)}  # of few outputs, the first
        bits = widths.get(zeros.shape[-1] if zeros.ndim else 0, self._bits[0])
        require_shape("qzeros", zeros, num_groups, -(-num_outputs * bits // 32))
        if self._is_less_one:
            zeros = zeros + sum(1 << shift for shift in range(0, 32, bits))  # wraps, as the subtraction did
        num_inputs = num_rows * 32 // bits
        size = self._find_group_size(num_inputs, num_groups)
        numbers = unpack_last(words.t().contiguous(), bits)
        order = None
        if "g_idx" in layer:
            order = runs_of_groups(layer.get("g_idx", torch.int32, torch.int64), num_inputs, size)
        return StoredWeight(
            "int4" if bits == 4 else "int8",
            numbers if order is None else numbers[:, order],
            scales.t().contiguous(),
            size,
            unpack_last(zeros, bits)[:, :num_outputs].t().contiguous(),
            order=order,
        )

    def _find_group_size(self, num_inputs: int, num_groups: int) -> int:
        """The first group size of the configuration that fits so many groups."""
        sizes = (size for size in self._group_sizes if size not in (None, -1))
        fitting = next((size for size in sizes if -(-num_inputs // size) == num_groups), self._group_sizes[0])
        return group_size_of(num_inputs, num_groups, fitting)


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
