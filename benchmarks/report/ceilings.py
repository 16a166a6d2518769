"""What the card reaches in this run; every percentage of the report is of these."""

from __future__ import annotations

import statistics
import time
from functools import partial

import torch

from report.bench import Bench
from report.rows import Row
from report.timing import Call, recorded, time_calls

NUM_EMPTY = 1000


def run(bench: Bench) -> None:
    """Memory, products, launches, the way to the host and back."""
    _memory(bench)
    _products(bench)
    _launches(bench)
    bench.attempt("round trip us", "us", lambda: _round_trip(bench))


def _memory(bench: Bench) -> None:
    size = bench.pick(1 << 30, 1 << 12)  # 2 GiB: no cache holds any of it when its turn comes
    source = torch.randn(size, dtype=bench.dtype, device=bench.device)
    target = torch.empty_like(source)
    copy = time_calls(bench, [lambda: target.copy_(source)])
    bench.ceiling("copy GB/s", 2 * source.nbytes / copy.median_s / 1e9)
    bench.attempt("read GB/s", "GB/s", lambda: _read(bench, source))
    bench.attempt("write GB/s", "GB/s", lambda: _write(bench, target))


def _read(bench: Bench, source: torch.Tensor) -> None:
    """The best of several ways to read: what a kernel might still reach."""
    from report.ceiling_kernels import read_sums

    whole = read_sums(source, bench.pick(132, 2), bench.pick(4096, 256), 8).double().sum()
    expected = source.double().sum() if bench.is_smoke else source.sum(dtype=torch.float32).double()
    tolerance = 1e-3 * float(source.numel()) ** 0.5
    if abs(float(whole - expected)) > tolerance:
        raise ArithmeticError(f"the read kernel summed {float(whole)}, not {float(expected)}")
    options = bench.pick(
        [(132 * k, block, warps) for k in (2, 4, 8, 16) for block, warps in ((2048, 4), (4096, 8), (8192, 8))],
        [(2, 512, 4)],
    )
    times = [time_calls(bench, [partial(read_sums, source, *o)]).median_s for o in options]
    times.append(time_calls(bench, [lambda: source.view(-1, source.numel() // 4).amax(1)]).median_s)
    bench.ceiling("read GB/s", source.nbytes / min(times) / 1e9)


def _write(bench: Bench, target: torch.Tensor) -> None:
    from report.ceiling_kernels import write_all

    calls: list[Call] = [lambda: write_all(target, 0.5, bench.pick(4096, 1024)), lambda: target.fill_(0.5)]
    times = [time_calls(bench, [call]).median_s for call in calls]
    bench.ceiling("write GB/s", target.nbytes / min(times) / 1e9)


def _products(bench: Bench) -> None:
    size = bench.pick(8192, 32)
    left, right = (torch.randn(size, size, dtype=bench.dtype, device=bench.device) for _ in range(2))
    timing = time_calls(bench, [lambda: left @ right.t()])
    bench.ceiling("bf16 product TFLOP/s", 2 * size**3 / timing.median_s / 1e12)
    bench.attempt("fp8 product TFLOP/s", "TFLOP/s", lambda: _fp8_product(bench, left, right))


def _fp8_product(bench: Bench, left: torch.Tensor, right: torch.Tensor) -> None:
    one = torch.ones((), dtype=torch.float32, device=bench.device)
    left8, right8 = (side.to(torch.float8_e4m3fn) for side in (left, right))

    def product() -> torch.Tensor:
        return torch._scaled_mm(left8, right8.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)

    timing = time_calls(bench, [product])
    bench.ceiling("fp8 product TFLOP/s", 2 * left.shape[0] ** 3 / timing.median_s / 1e12)


def _launches(bench: Bench) -> None:
    """Kernels that do nothing, a thousand in a graph."""
    if bench.device.type == "cpu":
        from report.ceiling_kernels import start_empty

        start_empty(torch.zeros(1, dtype=torch.int32), is_chained=False)
        bench.row(Row("empty kernel us", "us", note="there are no graphs on a CPU"))
        return
    bench.attempt("empty kernel us", "us", lambda: _empty(bench, "empty kernel us", is_chained=False))
    name = "empty kernel, dependent launch, us"
    if torch.cuda.get_device_capability() >= (9, 0):
        bench.attempt(name, "us", lambda: _empty(bench, name, is_chained=True))
    else:
        bench.row(Row(name, "us", note="needs compute capability 9.0"))
    for num_kernels in (1, 200):
        name = f"host cost of starting a graph of {num_kernels} us"
        bench.attempt(name, "us", partial(_graph_launch, bench, name, num_kernels))


def _empty(bench: Bench, name: str, *, is_chained: bool) -> None:
    from report.ceiling_kernels import start_empty

    out = torch.zeros(1, dtype=torch.int32, device=bench.device)
    calls: list[Call] = [lambda: start_empty(out, is_chained=is_chained)] * NUM_EMPTY
    bench.ceiling(name, time_calls(bench, calls).median_s * 1e6)


def _graph_launch(bench: Bench, name: str, num_kernels: int) -> None:
    from report.ceiling_kernels import start_empty

    out = torch.zeros(1, dtype=torch.int32, device=bench.device)
    times = []
    with recorded(lambda: [start_empty(out, is_chained=False) for _ in range(num_kernels)]) as graph:
        for _ in range(50):
            torch.cuda.synchronize()
            start_s = time.perf_counter()
            graph.replay()
            times.append(time.perf_counter() - start_s)
    bench.ceiling(name, statistics.median(times) * 1e6)


def _round_trip(bench: Bench) -> None:
    """Four bytes to the host, waited for: what a step costs that must know its token."""
    token = torch.zeros(1, dtype=torch.int32, device=bench.device)
    on_host = torch.zeros(1, dtype=torch.int32, pin_memory=bench.device.type == "cuda")
    times = []
    for _ in range(bench.pick(200, 3)):
        start_s = time.perf_counter()
        on_host.copy_(token, non_blocking=True)
        bench.synchronize()
        times.append(time.perf_counter() - start_s)
    bench.ceiling("round trip us", statistics.median(times) * 1e6)
