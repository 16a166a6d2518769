"""Linear layers at the shapes of three models, each format of the weight, beside cuBLAS in bfloat16."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from llmstack_kernels.linear import INT8_DYNAMIC, QUANTIZATIONS, bits_per_weight, linear, pack_linear
from report.bench import Bench
from report.floors import GPT2, LLAMA_1B, LLAMA_8B, ModelShape
from report.rows import Row
from report.timing import Timing, num_copies, time_calls

NUM_ROWS = (1, 8, 64, 256)
PROMPT_ROWS = 2048


@dataclass(frozen=True, slots=True)
class Layer:
    """One weight of a model: [out_features, in_features]."""

    model: str
    name: str
    out_features: int
    in_features: int
    num_layers: int

    @property
    def title(self) -> str:
        """For rows."""
        return f"{self.model} {self.name} {self.out_features}x{self.in_features}"


def layers(shape: ModelShape) -> list[Layer]:
    """Of a model, the head last."""
    heads = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    widened = shape.intermediate_size * (2 if shape.is_gated else 1)
    sizes = {
        "qkv": (heads, shape.hidden_size),
        "o": (shape.hidden_size, shape.num_heads * shape.head_dim),
        "up": (widened, shape.hidden_size),
        "down": (shape.hidden_size, shape.intermediate_size),
    }
    found = [Layer(shape.name, name, *size, shape.num_layers) for name, size in sizes.items()]
    return [*found, Layer(shape.name, "head", shape.vocab_size, shape.hidden_size, 1)]


def run(bench: Bench) -> None:
    """bfloat16, rows independent of their number; then all layers together, which is what a step does."""
    for shape in bench.pick((LLAMA_8B, LLAMA_1B, GPT2), (LLAMA_8B,)):
        totals: dict[int, list[tuple[Timing, Timing]]] = {rows: [] for rows in NUM_ROWS}
        for layer in layers(shape):
            if not bench.has_time(4):
                return
            for num_rows, pair in _measure_plain(bench, layer).items():
                totals[num_rows].extend([pair] * layer.num_layers)
        for num_rows, pairs in totals.items():
            if len(pairs) == 4 * shape.num_layers + 1:
                ours, peer = (1e6 * sum(side.median_s for side in sides) for sides in zip(*pairs, strict=True))
                spread = max(side.spread or 0.0 for pair in pairs for side in pair)
                bench.row(
                    Row(
                        f"deterministic linears {shape.name} bf16, M = {num_rows}, beside cuBLAS",
                        "us",
                        ours,
                        peer,
                        spread,
                    )
                )


def run_quantized(bench: Bench) -> None:
    """A prompt's product of integers; 8B in every format that can be packed, then 1B."""
    up = layers(LLAMA_8B)[2]
    title = f"8B up int8_dynamic, M = {PROMPT_ROWS}, beside cuBLAS bf16"
    bench.attempt(title, "us", partial(_measure_integers, bench, up, title))
    for shape in bench.pick((LLAMA_8B, LLAMA_1B), (LLAMA_8B,)):
        for scheme in (*QUANTIZATIONS, INT8_DYNAMIC):
            for layer in layers(shape)[: bench.pick(-1, 1)]:
                if bench.has_time(3):
                    title = f"{layer.title} {scheme}"
                    bench.attempt(title, "GB/s", partial(_measure_quantized, bench, layer, scheme))


def _measure_integers(bench: Bench, layer: Layer, title: str) -> Row:
    """Rounding of the rows and their product, with all that is read and written for it."""
    weight = make_weight(bench, layer)
    packed, x = pack_linear(weight, None, INT8_DYNAMIC), make_inputs(bench, PROMPT_ROWS, weight.shape[1])
    ours = time_calls(bench, [partial(linear, x, packed)], is_headline=True)
    peer = time_calls(bench, [partial(F.linear, x, weight)], is_headline=True)
    flops = 2 * x.shape[0] * weight.numel()
    note = f"{flops / ours.median_s / 1e12:.0f} trillion operations/s"
    return Row(title, "us", 1e6 * ours.median_s, 1e6 * peer.median_s, ours.spread, note)


def make_weight(bench: Bench, layer: Layer) -> torch.Tensor:
    """Random, as it would be loaded; a smoke run has a small one of two blocks."""
    shape = bench.pick((layer.out_features, layer.in_features), (48, 192))
    return 0.02 * torch.randn(shape, dtype=bench.dtype, device=bench.device)


def make_inputs(bench: Bench, num_rows: int, in_features: int) -> torch.Tensor:
    """Random rows."""
    return torch.randn(bench.pick(num_rows, min(num_rows, 3)), in_features, dtype=bench.dtype, device=bench.device)


def _measure_plain(bench: Bench, layer: Layer) -> dict[int, tuple[Timing, Timing]]:
    """Number of rows to our time and cuBLAS's, each over several copies of the weight."""
    num_bytes = 2 * layer.out_features * layer.in_features
    weights = [make_weight(bench, layer) for _ in range(num_copies(bench, num_bytes))]
    # Up to 64 rows the default is the same kernel; beyond, it is cuBLAS itself.
    packed = [pack_linear(weight, is_batch_invariant=True) for weight in weights]
    found: dict[int, tuple[Timing, Timing]] = {}

    def measure(num_rows: int) -> Row:
        x = make_inputs(bench, num_rows, weights[0].shape[1])
        ours = time_calls(bench, [partial(linear, x, p) for p in packed], is_headline=True)
        peer = time_calls(bench, [partial(F.linear, x, w) for w in weights], is_headline=True)
        found[num_rows] = (ours, peer)
        return _row(bench, layer, f"{layer.title} bf16, M = {num_rows}", num_rows, num_bytes, ours, peer)

    for num_rows in NUM_ROWS:
        bench.attempt(f"{layer.title} bf16, M = {num_rows}", "GB/s", partial(measure, num_rows))
    return found


def _measure_quantized(bench: Bench, layer: Layer, scheme: str) -> None:
    num_bytes = int(layer.out_features * layer.in_features * bits_per_weight(scheme) / 8)
    weight = make_weight(bench, layer)
    copies = min(64, num_copies(bench, num_bytes))
    packed = [pack_linear(weight, None, scheme) for _ in range(copies)]
    for num_rows in NUM_ROWS:
        x = make_inputs(bench, num_rows, weight.shape[1])
        ours = time_calls(bench, [partial(linear, x, p) for p in packed])
        bench.row(_row(bench, layer, f"{layer.title} {scheme}, M = {num_rows}", num_rows, num_bytes, ours))


def _row(
    bench: Bench, layer: Layer, title: str, num_rows: int, num_bytes: int, ours: Timing, peer: Timing | None = None
) -> Row:
    """Few rows are bounded by reading the weight, many by the product; the row tells the nearer one."""
    flops = 2 * num_rows * layer.out_features * layer.in_features
    read, product = bench.ceilings.get("read GB/s"), bench.ceilings.get("bf16 product TFLOP/s")
    note = f"{ours.median_s * 1e6:.1f} us"
    if peer is not None:
        note += f", cuBLAS {peer.median_s * 1e6:.1f} us, {peer.median_s / ours.median_s:.2f} x"
    if read and product and flops / product / 1e12 > num_bytes / read / 1e9:
        return Row(title, "TFLOP/s", flops / ours.median_s / 1e12, product, ours.spread, note)
    return Row(title, "GB/s", num_bytes / ours.median_s / 1e9, read, ours.spread, note)
