"""What each part of the engine is worth: the same steps with one of them off, or one more asked for."""

from __future__ import annotations

from functools import partial

from report.bench import Bench
from report.engine.decode import HEADLINE, NUM_STEPS, Point, Variant, measure_point, num_tokens
from report.engine.models import fitting, started
from report.floors import GPT2, LLAMA_1B, LLAMA_8B, ModelShape

POINTS = (HEADLINE, Point(64, 1024))


def run(bench: Bench) -> None:
    """Run-ahead, graphs, determinism. Fusion has no switch, so it is not here."""
    for shape in bench.pick((LLAMA_1B, LLAMA_8B, GPT2), (LLAMA_1B,)):
        for variant in variants(shape):
            if bench.has_time(12):
                bench.attempt(variant.name, "ms", partial(_measure, bench, variant))


def variants(shape: ModelShape) -> list[Variant]:
    """The most telling first."""
    name, eager = shape.name, {"enforce_eager": True}
    return [
        Variant(f"{name}, run-ahead off,", shape, is_ahead=False),
        Variant(f"{name}, graphs off,", shape, options=eager),
        Variant(f"{name}, graphs and run-ahead off,", shape, is_ahead=False, options=eager),
        Variant(f"{name}, deterministic,", shape, options={"enable_deterministic_inference": True}),
    ]


def _measure(bench: Bench, variant: Variant) -> None:
    tiny = fitting(bench, variant.shape)
    room = max(num_tokens(bench, point, tiny) for point in POINTS)
    max_model_len = min(tiny.max_model_len, POINTS[0].context + 3 * NUM_STEPS + 64)
    with started(bench, tiny, room, max_model_len=max_model_len, **variant.options) as runner:
        for point in POINTS:
            title = f"{variant.name} decode, {point.name}"
            bench.attempt(title, "ms", partial(measure_point, bench, runner, tiny, variant, point))
