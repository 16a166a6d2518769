"""Milliseconds of a photograph through decoder and processor, for each family at the sizes of published models.

`pytest` runs it as the other benchmarks. As a program it prints medians of nine.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import pytest
from PIL import Image
from pytest_benchmark.fixture import BenchmarkFixture

from llmstack_media import ImageProcessor, MediaLimits, decode_image, image_processor

PUBLISHED: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "SmolVLM": ({"image_processor_type": "Idefics3ImageProcessor", "size": {"longest_edge": 2048},
                 "max_image_size": {"longest_edge": 512}}, {"image_seq_len": 64}, 16),
    "Gemma 3": ({"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 896, "width": 896}}, {}, 14),
    "LLaVA 1.5": ({"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 336},
                   "crop_size": {"height": 336, "width": 336}}, {"patch_size": 14}, 14),
    "Qwen2.5-VL": ({"image_processor_type": "Qwen2VLImageProcessor", "min_pixels": 3136,
                    "max_pixels": 12845056}, {}, 14),
    "Pixtral": ({"image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": 1024}},
                {"patch_size": 16}, 16),
    "InternVL3": ({"image_processor_type": "GotOcr2ImageProcessor", "size": {"height": 448, "width": 448}}, {}, 14),
}  # fmt: skip


def photograph(width: int = 1920, height: int = 1080) -> bytes:
    """A JPEG with as much detail as a photograph."""
    y, x = np.mgrid[0:height, 0:width]
    waves = 127 + 60 * np.sin(x / 31)[..., None] + 50 * np.cos(y / 17)[..., None] * np.array([1, 0.5, -1])
    noise = np.random.default_rng(0).integers(-12, 12, size=(height, width, 1))
    buffer = io.BytesIO()
    Image.fromarray(np.clip(waves + noise, 0, 255).astype(np.uint8)).save(buffer, "JPEG", quality=90)
    return buffer.getvalue()


def processor(name: str) -> ImageProcessor:
    image, others, patch_size = PUBLISHED[name]
    return image_processor(image, others, model={"vision_config": {"patch_size": patch_size}})


@pytest.mark.parametrize("name", PUBLISHED)
def test_prepare(benchmark: BenchmarkFixture, name: str) -> None:
    pixels, one = decode_image(photograph(), MediaLimits()), processor(name)
    benchmark(one.prepare, pixels)


def test_decode(benchmark: BenchmarkFixture) -> None:
    benchmark(decode_image, photograph(), MediaLimits())


def median_ms(work: Callable[[], object]) -> float:
    """Processor time of this thread."""
    times_ms = []
    for _ in range(9):
        began_s = time.thread_time()
        work()
        times_ms.append((time.thread_time() - began_s) * 1000)
    return median(times_ms)


def main() -> None:
    data, limits = photograph(), MediaLimits()
    pixels = decode_image(data, limits)
    print(f"decode a JPEG of 1920 × 1080: {median_ms(lambda: decode_image(data, limits)):.1f} ms")
    for name in PUBLISHED:
        one = processor(name)
        taken_ms = median_ms(partial(one.prepare, pixels))
        print(f"{name}: {taken_ms:.1f} ms, {one.layout(1920, 1080).num_vectors} vectors")


if __name__ == "__main__":
    main()
