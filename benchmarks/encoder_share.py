"""Share of the processor's product rate that encoders of sound and pictures reach, with random weights.

    python benchmarks/encoder_share.py --dtype float32 --tower whisper-tiny siglip
    LLMSTACK_KERNELS=bidirectional_attention=reference python benchmarks/encoder_share.py

The share is the products of the tower over its processor time and over the rate of products whose operands are in
registers, which is measured in turns with it (`packages/kernels/benchmarks/roofline.py`). Layers run in the slices of a
server on a CPU, on one thread. Norms, activations and weights of attention count no products, but their time counts.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from llmstack_kernels.native import require_library
from llmstack_model_runner.encoders.layer import LayerSettings
from llmstack_model_runner.encoders.siglip import SiglipTower
from llmstack_model_runner.encoders.sliced_encoder import SLICE_UNITS
from llmstack_model_runner.encoders.whisper import STRIDE, SpeechSizes, WhisperEncoder
from llmstack_types import MediaItem
from llmstack_types.media import num_slices

NUM_ROUNDS = 7
CPU = torch.device("cpu")
NUM_BINS, NUM_STATES = 80, 1500
SIDE, PATCH = 27, 14  # patches along a side, and pixels along a patch's: SigLIP so400m at 384 pixels
SIGLIP = {"hidden_size": 1152, "intermediate_size": 4304, "num_attention_heads": 16, "image_size": SIDE * PATCH,
          "patch_size": PATCH}  # fmt: skip


class Tower(NamedTuple):
    """What runs all of a tower, and the products of a run in floating-point operations."""

    run: Callable[[], object]
    num_flops: int


def fill(slots: Any) -> None:
    """Loads random weights."""
    for slot in slots.values():
        slot.put(0.02 * torch.randn(slot.shape))


def layer_flops(num_rows: int, size: int, inner_size: int) -> int:
    """Products of a layer, in floating-point operations: its linear layers, and attention of all rows to all."""
    return 2 * num_rows * (4 * size * size + 2 * size * inner_size) + 4 * num_rows * num_rows * size


def whisper(size: int, num_layers: int, dtype: torch.dtype) -> Tower:
    """An encoder of 30 seconds of sound."""
    settings = LayerSettings(size, 4 * size, size // 64, 1e-5, "gelu")
    encoder = WhisperEncoder(SpeechSizes(NUM_BINS, NUM_STATES, num_layers), settings, dtype, CPU)
    fill(encoder.slots())
    item = MediaItem(bytes(32), "audio", 0, NUM_STATES, layout=(STRIDE * NUM_STATES,), num_units=NUM_STATES)
    sound = bytearray(torch.randn(NUM_BINS, STRIDE * NUM_STATES).numpy().tobytes())
    count = num_layers * num_slices(NUM_STATES, encoder.slice_units)
    convolutions = 2 * 3 * NUM_STATES * size * (STRIDE * NUM_BINS + size)
    return Tower(
        lambda: encoder.finish(item, encoder.run_layers(item, encoder.begin(item, sound), 0, count)),
        convolutions + num_layers * layer_flops(NUM_STATES, size, 4 * size),
    )


def siglip(num_layers: int, dtype: torch.dtype) -> Tower:
    """So many layers of SigLIP so400m over one picture."""
    tower = SiglipTower("", SIGLIP | {"num_hidden_layers": num_layers}, {}, dtype, CPU)
    fill(tower.slots())
    pixels, positions = torch.randn(1, 3, SIDE * PATCH, SIDE * PATCH).to(dtype), torch.arange(SIDE**2)
    slices = num_slices(SIDE**2, SLICE_UNITS)

    def run() -> torch.Tensor:
        hidden = tower.enter(pixels, positions)
        for number in range(num_layers):
            layer = tower.layer(number, SIDE**2, 1)
            projected, behind = layer.begin(hidden)
            for index in range(slices):
                layer.fill(hidden, projected, behind, index, slices)
            hidden = behind
        return tower.leave(hidden)

    size, inner_size = tower.size, tower.inner_size
    patches = 2 * SIDE**2 * size * 3 * PATCH**2
    return Tower(run, patches + num_layers * layer_flops(SIDE**2, size, inner_size))


TOWERS: dict[str, Callable[[torch.dtype], Tower]] = {
    "whisper-tiny": lambda dtype: whisper(384, 4, dtype),
    "whisper-base": lambda dtype: whisper(512, 6, dtype),
    "siglip": lambda dtype: siglip(3, dtype),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tower", nargs="+", choices=TOWERS, default=list(TOWERS))
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    options = parser.parse_args()
    torch.set_num_threads(1)
    sys.path.insert(0, str(Path(__file__).parents[1] / "packages/kernels/benchmarks"))
    roofline = importlib.import_module("roofline")
    variant = require_library().variant
    print(f"{options.dtype}, {variant}, one thread\n\n| tower | GFLOP | ms | GFLOP/s | rate of products | share |")
    print("|---|---|---|---|---|---|")
    for name in options.tower:
        roofs = roofline.Roofs(variant, 1, options.dtype)
        with torch.inference_mode():
            tower = TOWERS[name](getattr(torch, options.dtype))
            tower.run()
            seconds = []
            for _ in range(NUM_ROUNDS):
                roofs.measure()
                seconds.append(roofline.elapsed_s(tower.run, 1))
        rate = tower.num_flops / statistics.median(seconds)
        print(
            f"| {name} | {tower.num_flops / 1e9:.1f} | {statistics.median(seconds) * 1e3:.0f} | {rate / 1e9:.1f}"
            f" | {roofs.flops_per_s / 1e9:.1f} | {rate / roofs.flops_per_s:.0%} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
