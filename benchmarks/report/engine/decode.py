"""Decode steps of the runner at several batches and contexts: time, share of the floor, and where the rest goes."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from llmstack_types import SamplingParams
from report.bench import Bench
from report.engine.device_time import profiled
from report.engine.driver import Decoder, DraftDecoder, decoding, prefill_times
from report.engine.models import BLOCK_SIZE, Started, fitting, started
from report.floors import GPT2, LLAMA_1B, LLAMA_8B, Ceilings, ModelShape, decode_s, prefill_s
from report.rows import Row

GRID = ((1, 1024), (8, 1024), (64, 1024), (256, 1024), (1, 8192), (8, 8192), (64, 8192), (256, 8192))
GREEDY = SamplingParams(temperature=0.0, max_tokens=10_000, ignore_eos=True)
NUM_STEPS = 60
NUM_PROFILED = 20
NUM_DRAFTS = 4


@dataclass(frozen=True, slots=True)
class Point:
    """A batch at a context; `name` is as the rows say it."""

    batch: int
    context: int

    @property
    def name(self) -> str:
        """Such as `64 x 1k`."""
        return f"{self.batch} x {self.context // 1024}k"


HEADLINE = Point(1, 1024)


@dataclass(frozen=True, slots=True)
class Variant:
    """A model as it is run.

    Attributes:
        name: As rows begin.
        weights: A key of `floors.BITS_PER_WEIGHT`.
        options: Fields of `ModelRunnerConfig`.
    """

    name: str
    shape: ModelShape
    weights: str = "bf16"
    kv_bits: int = 16
    is_ahead: bool = True
    options: dict[str, Any] = field(default_factory=dict)


def run_8b(bench: Bench) -> None:
    """Llama-3-8B's shape."""
    measure_model(bench, Variant("8B", LLAMA_8B))


def run_1b(bench: Bench) -> None:
    """Llama-3.2-1B's shape."""
    measure_model(bench, Variant("1B", LLAMA_1B))


def run_gpt2(bench: Bench) -> None:
    """GPT-2 124M, whose contexts end at 1,024."""
    measure_model(bench, Variant("GPT-2", GPT2))


def run_8b_int8(bench: Bench) -> None:
    """8B with weights of 8 bits, at small batches, where they pay."""
    variant = Variant("8B w8", LLAMA_8B, weights="w8", options={"quantization": "int8"})
    measure_model(bench, variant, [Point(1, 1024), Point(8, 1024), Point(64, 1024)])


def run_8b_fp8_kv(bench: Bench) -> None:
    """8B with keys and values of 8 bits, where there are many."""
    variant = Variant("8B fp8 KV", LLAMA_8B, kv_bits=8, options={"kv_cache_dtype": bench.pick("fp8", "auto")})
    measure_model(bench, variant, [Point(64, 8192), Point(64, 1024)])


def run_8b_drafts(bench: Bench) -> None:
    """8B with drafts in every row, whose steps replay graphs and do not run ahead."""
    for batch in bench.pick((1, 8), (1,)):
        title = f"8B step with {NUM_DRAFTS} drafts, {Point(batch, 1024).name}"
        if bench.has_time(12):
            bench.attempt(title, "ms", partial(_drafts, bench, LLAMA_8B, batch, title))


def _drafts(bench: Bench, shape: ModelShape, batch: int, title: str) -> Row:
    """A step of one known token and `NUM_DRAFTS` drafts per row; the floor is that of a step without drafts."""
    tiny, count = fitting(bench, shape), num_steps(bench)
    context = _context(bench, Point(batch, 1024), tiny)
    room = Decoder.num_tokens(batch, context, (count + 10) * (1 + NUM_DRAFTS), BLOCK_SIZE)
    options = {"max_num_drafts": NUM_DRAFTS, "max_model_len": min(tiny.max_model_len, room // batch)}
    with started(bench, tiny, room, **options) as runner:
        decoder = DraftDecoder(
            runner.runner, BLOCK_SIZE, batch=batch, context=context, num_steps=count + 10, params=GREEDY,
            num_drafts=NUM_DRAFTS,
        )  # fmt: skip
        with decoding(decoder, bench.pick(8192, 16)):
            decoder.steps(bench.pick(10, 3))
            samples = sorted(decoder.steps(count))
        how = runner.runner.backends()["decode"]
    ceilings = bench.floor_ceilings()
    floor_ms = None if ceilings is None else 1e3 * decode_s(shape, batch, context, ceilings)
    note = f"p99 {1e3 * samples[int(0.99 * len(samples))]:.3f} ms, {how}"
    return Row(title, "ms", 1e3 * statistics.median(samples), floor_ms, note=note)


def measure_model(bench: Bench, variant: Variant, points: Sequence[Point] = ()) -> None:
    """Start-up, then every point that fits the memory, the first one in detail, then prompts."""
    tiny, name = fitting(bench, variant.shape), variant.name
    points = points or [Point(*pair) for pair in GRID if pair[1] <= variant.shape.max_model_len]
    longest = max(point.context for point in points)
    room = max(num_tokens(bench, point, tiny) for point in points)
    max_model_len = min(tiny.max_model_len, longest + 3 * NUM_STEPS + 64)
    with started(bench, tiny, room, max_model_len=max_model_len, **variant.options) as runner:
        for phase, seconds in runner.phases_s.items():
            bench.row(Row(f"{name} start, {phase}", "s", seconds))
        bench.text(f"  {name} backends: {dict(runner.runner.backends())}")
        for point in bench.pick(points, points[:2]):
            title = f"{name} decode, {point.name}"
            if not bench.has_time(3):
                bench.row(Row(title, "ms", note="dropped: no time"))
            elif num_tokens(bench, point, tiny) > runner.num_blocks * BLOCK_SIZE:
                bench.row(Row(title, "ms", note="does not fit the memory"))
            else:
                bench.attempt(title, "ms", partial(measure_point, bench, runner, tiny, variant, point))
        _prefills(bench, runner, tiny, name, longest)


def num_steps(bench: Bench) -> int:
    """Of one measurement."""
    return bench.pick(NUM_STEPS, 4)


def _context(bench: Bench, point: Point, shape: ModelShape) -> int:
    """Of the first step: so that the last one still fits the model."""
    return bench.pick(min(point.context, shape.max_model_len - 3 * NUM_STEPS), 20)


def num_tokens(bench: Bench, point: Point, shape: ModelShape) -> int:
    """Room in KV storage that a measurement of the point takes."""
    batch = bench.pick(point.batch, min(point.batch, 2))
    return Decoder.num_tokens(batch, _context(bench, point, shape), 3 * num_steps(bench), BLOCK_SIZE)


def measure_point(bench: Bench, runner: Started, shape: ModelShape, variant: Variant, point: Point) -> Row:
    """The row of one point; of the first point also what the host costs and whether the device waits."""
    context, batch = _context(bench, point, shape), bench.pick(point.batch, min(point.batch, 2))
    count, is_ahead, is_headline = num_steps(bench), variant.is_ahead, point == HEADLINE
    decoder = Decoder(runner.runner, BLOCK_SIZE, batch=batch, context=context, num_steps=3 * count, params=GREEDY)
    with decoding(decoder, bench.pick(8192, 16)):
        decoder.steps(bench.pick(10, 3), is_ahead=is_ahead)  # whatever is recorded at first need is recorded now
        runner.runner.timing.reset()
        samples = [decoder.steps(count, is_ahead=is_ahead) for _ in range(2 if is_headline else 1)]
        host_us = 1e6 * runner.runner.timing.host_s / max(1, runner.runner.timing.num_steps)
        medians = [statistics.median(sample) for sample in samples]
        step_s = min(medians)
        if is_headline and is_ahead:
            title = f"{variant.name} host overhead per step, {point.name}"
            bench.attempt(title, "us", lambda: _device_rows(bench, decoder, variant.name, point, step_s))
    ceilings = bench.floor_ceilings()
    floor_ms = None
    if ceilings is not None:
        floor_ms = 1e3 * decode_s(shape, batch, context + count, ceilings, variant.weights, variant.kv_bits)
    everything = sorted(step for sample in samples for step in sample)
    slow_s = everything[int(0.99 * len(everything))]
    note = (
        f"p99 {1e3 * slow_s:.3f} ms, {batch / step_s:,.0f} tok/s, host at work {host_us:.0f} us, from {context} tokens"
    )
    spread = abs(medians[0] - medians[-1]) / step_s if is_headline else None
    return Row(f"{variant.name} decode, {point.name}", "ms", 1e3 * step_s, floor_ms, spread, note)


def _device_rows(bench: Bench, decoder: Decoder, name: str, point: Point, step_s: float) -> Row:
    """Wall time less the device's own; pauses of up to 5 us between kernels are the device's."""
    count = bench.pick(NUM_PROFILED, 3)
    device = profiled(lambda: decoder.steps(count, is_ahead=True), bench.device.type)
    own_us = (device.busy_us + device.gaps_us) / count
    bench.row(Row(f"{name} device idle between steps, {point.name}", "%", 100 * device.idle_share))
    bench.row(Row(f"{name} device busy per step, {point.name}", "us", device.busy_us / count))
    bench.row(Row(f"{name} gaps between kernels per step, {point.name}", "us", device.gaps_us / count))
    return Row(f"{name} host overhead per step, {point.name}", "us", max(0.0, 1e6 * step_s - own_us))


def _prefills(bench: Bench, runner: Started, shape: ModelShape, name: str, longest: int) -> None:
    """Whole prompts in one step."""
    for length in (1024, 2048, 8192):
        title = f"{name} prefill, {length} tokens"
        if length <= longest and bench.has_time(3):
            bench.attempt(title, "ms", partial(_prefill, bench, runner, shape, length, title))


def _prefill(bench: Bench, runner: Started, shape: ModelShape, length: int, title: str) -> Row:
    length = bench.pick(min(length, shape.max_model_len - 1), 20)
    times = list(prefill_times(runner.runner, BLOCK_SIZE, length, bench.pick(6, 2)))[1:]
    ceilings: Ceilings | None = bench.floor_ceilings()
    floor_ms = None if ceilings is None else 1e3 * prefill_s(shape, length, ceilings)
    step_s = statistics.median(times)
    return Row(title, "ms", 1e3 * step_s, floor_ms, note=f"{length / step_s:,.0f} tok/s")
