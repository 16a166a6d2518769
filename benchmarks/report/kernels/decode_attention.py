"""Decode attention: shapes of three models, batches and contexts, beside what else can do it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F

from report.bench import Bench
from report.floors import LLAMA_1B, LLAMA_8B, MODELS, ModelShape
from report.kernels.attention_inputs import (
    BLOCK_SIZE,
    Batch,
    gathered,
    kv_bytes_per_token,
    make_batch,
    ragged_lengths,
)
from report.rows import Row
from report.timing import num_copies, time_calls

GRID = ((64, 1024), (64, 8192), (1, 1024), (1, 8192), (1, 32768), (16, 1024), (17, 8192), (256, 1024))
NUM_RAGGED = 64
LONGEST = 16384


def run(bench: Bench) -> None:
    """The grid in bfloat16; what the targets are about comes first."""
    for shape in (LLAMA_8B, LLAMA_1B):
        for name, lengths in _batches(bench, GRID[:2]):
            _measure(bench, shape, name, lengths, is_headline=True)
    for shape in bench.pick(MODELS, MODELS[:1]):
        is_known = shape in (LLAMA_8B, LLAMA_1B)
        for name, lengths in _batches(bench, GRID[2:] if is_known else GRID, is_ragged=not is_known)[
            : bench.pick(9, 2)
        ]:
            if bench.has_time(3):
                _measure(bench, shape, name, lengths)


def run_fp8(bench: Bench) -> None:
    """The same with keys and values in 8 bits."""
    for shape in (LLAMA_8B, LLAMA_1B):
        for name, lengths in _batches(bench, GRID)[: bench.pick(9, 1)]:
            if bench.has_time(3):
                _measure(bench, shape, name, lengths, torch.float8_e4m3fn)


def _batches(bench: Bench, grid: Sequence[tuple[int, int]], *, is_ragged: bool = True) -> list[tuple[str, list[int]]]:
    """Name and lengths; a smoke run has two short rows in place of each."""
    batches = [(f"{rows} x {context // 1024}k", bench.pick([context] * rows, [9, 9])) for rows, context in grid]
    if is_ragged:
        batches.append((f"ragged {NUM_RAGGED}", bench.pick(ragged_lengths(NUM_RAGGED, LONGEST), [5, 18])))
    return batches


def _measure(
    bench: Bench,
    shape: ModelShape,
    name: str,
    lengths: list[int],
    kv_dtype: torch.dtype = torch.bfloat16,
    *,
    is_headline: bool = False,
) -> None:
    kind = "fp8 KV" if kv_dtype == torch.float8_e4m3fn else "bf16"
    title = f"decode attention {shape.name} {kind}, {name}"
    kv_dtype = kv_dtype if kind == "fp8 KV" else bench.dtype

    def measure() -> Row:
        copies = num_copies(bench, sum(lengths) * kv_bytes_per_token(shape, kv_dtype))
        batch = make_batch(bench, shape, [(1, length) for length in lengths], kv_dtype=kv_dtype, num_copies=copies)
        calls = [partial(batch.attend, copy) for copy in range(copies)]
        timing = time_calls(bench, calls, is_headline=is_headline)
        rate = batch.kv_bytes / timing.median_s / 1e9
        note = f"{timing.median_s * 1e6:.1f} us"
        return Row(title, "GB/s", rate, bench.ceilings.get("read GB/s"), timing.spread, note)

    bench.attempt(title, "GB/s", measure)


def run_peers(bench: Bench) -> None:
    """8B: SDPA and FlexAttention over keys that lie in order already, FlashInfer over blocks, where it is installed."""
    for name, lengths in _batches(bench, GRID[:2]):
        is_even = len(set(lengths)) == 1
        batch = make_batch(bench, LLAMA_8B, [(1, length) for length in lengths])
        peers: dict[str, Callable[[], Row]] = {}
        if is_even:
            peers["SDPA over gathered KV"] = partial(_sdpa, bench, batch)
            if not bench.is_smoke:  # compiling on a CPU needs a C++ compiler
                peers["FlexAttention over gathered KV"] = partial(_flex, bench, batch)
        peers["FlashInfer"] = partial(_flashinfer, bench, batch)
        for peer, measure in peers.items():
            if bench.has_time(15):
                _attempt_peer(bench, f"decode attention 8B bf16, {name}, {peer}", measure)


def _attempt_peer(bench: Bench, title: str, measure: Callable[[], Row]) -> None:
    def named() -> Row:
        row = measure()
        return Row(title, row.unit, row.measured, row.bound, row.spread, row.note)

    bench.attempt(title, "GB/s", named)


def _sides(bench: Bench, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query, keys and values as [num_rows, heads, length, head_dim]."""
    both = [gathered(batch, row) for row in range(len(batch.rows))]
    keys, values = (torch.stack(side).to(bench.dtype) for side in zip(*both, strict=True))
    return batch.query[:, :, None], keys, values


def _rate(bench: Bench, batch: Batch, call: Callable[[], object], note: str, *, is_captured: bool = True) -> Row:
    timing = time_calls(bench, [call], is_captured=is_captured)
    rate = batch.kv_bytes / timing.median_s / 1e9
    return Row("", "GB/s", rate, bench.ceilings.get("read GB/s"), note=f"{timing.median_s * 1e6:.1f} us, {note}")


def _sdpa(bench: Bench, batch: Batch) -> Row:
    sides = _sides(bench, batch)
    return _rate(bench, batch, lambda: F.scaled_dot_product_attention(*sides, enable_gqa=True), "gathering not counted")


def _flex(bench: Bench, batch: Batch) -> Row:
    from torch.nn.attention.flex_attention import flex_attention

    sides = _sides(bench, batch)
    compiled = torch.compile(flex_attention, dynamic=False)
    return _rate(bench, batch, lambda: compiled(*sides, enable_gqa=True), "gathering not counted")


def _flashinfer(bench: Bench, batch: Batch) -> Row:
    try:
        import flashinfer
    except ImportError:
        return Row("", "GB/s", note="flashinfer is not installed")
    lengths = [seq_len for _, seq_len in batch.rows]
    counts = torch.tensor([0, *(-(-length // BLOCK_SIZE) for length in lengths)], dtype=torch.int32)
    indices = torch.cat([batch.tables[0][row, : int(counts[row + 1])] for row in range(len(lengths))])
    last = torch.tensor([(length - 1) % BLOCK_SIZE + 1 for length in lengths], dtype=torch.int32)
    workspace = torch.empty(256 << 20, dtype=torch.uint8, device=bench.device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=True)
    heads = (batch.query.shape[1], batch.key_cache.shape[1], batch.query.shape[2])
    starts = counts.cumsum(0, dtype=torch.int32).to(bench.device)
    wrapper.plan(starts, indices, last.to(bench.device), *heads, BLOCK_SIZE, q_data_type=bench.dtype)
    caches = (batch.key_cache, batch.value_cache)
    return _rate(bench, batch, lambda: wrapper.run(batch.query, caches), "planning not counted")
