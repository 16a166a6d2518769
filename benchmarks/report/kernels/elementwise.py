"""Operations that do little with each byte: bytes read and written once, over the time, beside a copy."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from llmstack_kernels.activation import gelu_tanh, silu_and_mul
from llmstack_kernels.embedding import embedding
from llmstack_kernels.launch import Launch, intercepted, launch
from llmstack_kernels.layer_norm import fused_add_layer_norm
from llmstack_kernels.rms_norm import fused_add_rms_norm
from report.bench import Bench
from report.floors import LLAMA_8B
from report.rows import Row
from report.timing import num_copies, time_calls

NUM_ROWS = (16384, 256, 1)
START = "start of a kernel by the host"


@dataclass(frozen=True, slots=True)
class Operation:
    """`make` returns a call over buffers of its own, and the bytes that it must move."""

    name: str
    make: Callable[[Bench, int], tuple[Callable[[], object], int]]


def run(bench: Bench) -> None:
    """Many rows, where the memory decides, then as many as decode steps have."""
    for num_rows in NUM_ROWS:
        for operation in OPERATIONS:
            title = operation.name.format(num_rows)
            bench.attempt(title, "GB/s", partial(_measure, bench, operation, num_rows, title))
    bench.attempt(START, "us", partial(_start, bench))


def _start(bench: Bench) -> Row:
    """Time of the host for a start outside of graphs, as in steps with prompts, beside `kernel[grid](...)`."""
    from llmstack_kernels.rms_norm.triton import rms_norm

    launches: list[Launch] = []
    with intercepted(launches.append):
        rms_norm(_random(bench, 1, 64), _random(bench, 64), 1e-5)
    (first,) = launches

    def through_cache() -> None:
        launch(first.kernel, first.grid, *first.arguments, **first.options)

    def by_triton() -> None:
        first.kernel[first.grid](*first.arguments, **first.options)

    own_us, triton_us = (_host_us(bench, start) for start in (through_cache, by_triton))
    return Row(START, "us", own_us, triton_us, note=f"{len(first.arguments)} arguments")


def _host_us(bench: Bench, start: Callable[[], None]) -> float:
    """Median of rounds so short that the queue of the device never fills."""
    num_starts, times = bench.pick(100, 1), []
    for _ in range(bench.pick(20, 2)):
        bench.synchronize()
        start_s = time.perf_counter()
        for _ in range(num_starts):
            start()
        times.append((time.perf_counter() - start_s) / num_starts)
    return 1e6 * statistics.median(times)


def _measure(bench: Bench, operation: Operation, num_rows: int, title: str) -> Row:
    small = bench.pick(num_rows, min(num_rows, 3))
    call, num_bytes = operation.make(bench, small)
    calls = [call, *(operation.make(bench, small)[0] for _ in range(min(32, num_copies(bench, num_bytes)) - 1))]
    timing = time_calls(bench, calls, is_headline=num_rows == NUM_ROWS[0])
    # Few rows fit the cache whatever is done: the time is reported, not a share of the memory's rate.
    bound = bench.ceilings.get("copy GB/s") if num_rows == NUM_ROWS[0] else None
    rate = num_bytes / timing.median_s / 1e9
    return Row(title, "GB/s", rate, bound, timing.spread, f"{timing.median_s * 1e6:.2f} us")


def _random(bench: Bench, *shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=bench.dtype, device=bench.device)


def _rms_norm(bench: Bench, num_rows: int) -> tuple[Callable[[], object], int]:
    size = bench.pick(4096, 64)
    x, residual, weight = _random(bench, num_rows, size), _random(bench, num_rows, size), _random(bench, size)
    return lambda: fused_add_rms_norm(x, residual, weight, 1e-5), 4 * x.nbytes


def _layer_norm(bench: Bench, num_rows: int) -> tuple[Callable[[], object], int]:
    size = bench.pick(4096, 64)
    x, residual = _random(bench, num_rows, size), _random(bench, num_rows, size)
    weight, bias = _random(bench, size), _random(bench, size)
    return lambda: fused_add_layer_norm(x, residual, weight, bias, 1e-5), 4 * x.nbytes


def _silu(bench: Bench, num_rows: int) -> tuple[Callable[[], object], int]:
    x = _random(bench, num_rows, 2 * bench.pick(14336, 64))
    return lambda: silu_and_mul(x), x.nbytes + x.nbytes // 2


def _gelu(bench: Bench, num_rows: int) -> tuple[Callable[[], object], int]:
    x = _random(bench, num_rows, bench.pick(3072, 64))
    return lambda: gelu_tanh(x), 2 * x.nbytes


def _embedding(bench: Bench, num_rows: int) -> tuple[Callable[[], object], int]:
    table = _random(bench, bench.pick(32768, 50), bench.pick(4096, 64))
    ids = torch.randint(0, len(table), (num_rows,), device=bench.device)
    return lambda: embedding(ids, table), 2 * num_rows * table.shape[1] * table.element_size()


def _rotary_and_cache(bench: Bench, num_rows: int) -> tuple[Callable[[], object], int]:
    """As a layer of 8B does it: query rotated, key rotated and written, value written."""
    from llmstack_kernels.rotary_and_cache import RotaryInputs, rotary_and_cache

    shape, block_size = LLAMA_8B, 16
    num_heads, num_kv_heads, head_dim = bench.pick((shape.num_heads, shape.num_kv_heads, shape.head_dim), (4, 2, 16))
    qkv = _random(bench, num_rows, num_heads + 2 * num_kv_heads, head_dim)
    query, key, value = qkv.split([num_heads, num_kv_heads, num_kv_heads], 1)
    num_blocks = -(-num_rows // block_size) + 1
    caches = [_random(bench, num_blocks, num_kv_heads, block_size, head_dim) for _ in range(2)]
    angles = torch.randn(8192, head_dim, dtype=torch.float32, device=bench.device)
    positions = torch.arange(num_rows, device=bench.device) % 8192
    slots = torch.randperm(num_rows, device=bench.device)
    written = num_rows * (num_heads + 2 * num_kv_heads) * head_dim * qkv.element_size()
    inputs = RotaryInputs(positions, query, key, value, angles, *caches, slots)
    return lambda: rotary_and_cache(inputs), qkv.nbytes + written


OPERATIONS = (
    Operation("add + RMSNorm, {} x 4096", _rms_norm),
    Operation("SiLU-mul, {} x 14336", _silu),
    Operation("rotary + cache write, {} tokens of 8B", _rotary_and_cache),
    Operation("add + LayerNorm, {} x 4096", _layer_norm),
    Operation("GELU, {} x 3072", _gelu),
    Operation("embedding, {} x 4096", _embedding),
)
