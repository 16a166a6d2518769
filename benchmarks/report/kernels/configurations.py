"""Cuts of linear layers measured one after the other; those that beat the rule's, as lines for the table of cuts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch

from llmstack_kernels.linear import linear
from llmstack_kernels.linear.configurations import CHUNK_SIZES, FORMATS, Configuration, candidates
from llmstack_kernels.linear.packed_formats import pack_chunks, pack_stored_chunks
from llmstack_kernels.linear.quantization import QUANTIZATIONS, quantize
from llmstack_kernels.linear.triton import TritonLinear
from report.bench import Bench
from report.floors import LLAMA_1B, LLAMA_8B
from report.kernels.linears import Layer, layers, make_inputs, make_weight
from report.rows import Row
from report.timing import num_copies, time_calls

NUM_ROWS = (1, 64)
LEAST_GAIN = 0.03
"""A cut has to save so much of the time of one row and of 64 together; less may be chance."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A cut and its seconds at each of `NUM_ROWS`."""

    configuration: Configuration
    seconds: tuple[float, ...]


def run(bench: Bench) -> None:
    """8B and 1B in bfloat16, then integers, as far as there is time; the lines come after each layer."""
    for weight_format, layer in list(_work())[:: bench.pick(1, 8)]:
        if not bench.has_time(12):
            bench.text("the other layers were left out: no time")
            return
        title = f"cut of {layer.title} {weight_format}"
        bench.attempt(title, "us", partial(_sweep, bench, layer, weight_format, title))


def _work() -> Iterator[tuple[str, Layer]]:
    for weight_format in FORMATS:
        for shape in (LLAMA_8B, LLAMA_1B):
            for layer in layers(shape)[:-1]:
                yield weight_format, layer


def _sweep(bench: Bench, layer: Layer, weight_format: str, title: str) -> Row:
    weights = _weights(bench, layer, weight_format)
    cuts = list(candidates(weight_format, layer.out_features, layer.in_features))
    measured = [_measure(bench, weights, weight_format, cut) for cut in bench.pick(cuts, cuts[:2])]
    chosen, best = measured[0], min(measured, key=lambda one: sum(one.seconds))
    if sum(best.seconds) < (1 - LEAST_GAIN) * sum(chosen.seconds):
        bench.text(f"    {(weight_format, layer.out_features, layer.in_features)!r}: {best.configuration!r},")
    times = ", ".join(f"M = {n}: {1e6 * s:.1f} us" for n, s in zip(NUM_ROWS, best.seconds, strict=True))
    note = f"best of {len(measured)}, {times}"
    return Row(title, "us", 1e6 * sum(chosen.seconds), 1e6 * sum(best.seconds), note=note)


Weight = tuple[tuple[int, int], torch.Tensor, torch.Tensor | None]
"""Shape, what is stored, scales."""


def _weights(bench: Bench, layer: Layer, weight_format: str) -> list[Weight]:
    """Copies enough to leave the cache."""
    weight = make_weight(bench, layer)
    shape = (weight.shape[0], weight.shape[1])
    if weight_format == "plain":
        return [(shape, weight.clone(), None) for _ in range(num_copies(bench, weight.nbytes))]
    stored, scales = _pack(weight, weight_format)
    return [(shape, stored.clone(), scales) for _ in range(num_copies(bench, stored.nbytes))]


def _pack(weight: torch.Tensor, weight_format: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers and scales in a format that is rounded to, or in one of checkpoints."""
    if weight_format in QUANTIZATIONS:
        return pack_chunks(quantize(weight, weight_format))
    stored = quantize(weight, "int4" if weight_format == "int4_zeros" else "fp8").stored()
    if weight_format == "fp8_block":
        size = CHUNK_SIZES[weight_format]
        stored = replace(stored, scales=stored.scales.repeat(1, -(-weight.shape[1] // size)), group_size=size)
    packed = pack_stored_chunks(stored)
    if packed is None or packed[0] != weight_format:
        raise ValueError(f"no weight of {tuple(weight.shape)} is stored as {weight_format}.")
    return packed[1:]


def _measure(bench: Bench, weights: list[Weight], weight_format: str, cut: Configuration) -> Measured:
    packed = [TritonLinear(shape, bench.dtype, None, w, s, weight_format, None, cut) for shape, w, s in weights]
    seconds = []
    for num_rows in NUM_ROWS:
        x = make_inputs(bench, num_rows, packed[0].in_features)
        seconds.append(time_calls(bench, [partial(linear, x, p) for p in packed]).median_s)
    return Measured(cut, tuple(seconds))
