"""Prefill attention of one prompt, beside the ways PyTorch has for it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from report.bench import Bench
from report.floors import LLAMA_1B, LLAMA_8B, ModelShape, causal_attention_flops
from report.kernels.attention_inputs import make_batch
from report.rows import Row
from report.timing import time_calls

LENGTHS = (8192, 2048)


def run(bench: Bench) -> None:
    """Ours, then SDPA by flash attention and by cuDNN, each forced."""
    for shape in (LLAMA_8B, LLAMA_1B):
        for length in LENGTHS:
            title = f"prefill attention {shape.name}, {length // 1024}k"
            ours = bench.attempt(title, "TFLOP/s", partial(_ours, bench, shape, length, title))
            chunk_title = f"{title}, the last 2k of them"
            if length > LENGTHS[1]:
                bench.attempt(chunk_title, "TFLOP/s", partial(_chunk, bench, shape, length, chunk_title))
            for peer, backend in (
                ("SDPA flash", SDPBackend.FLASH_ATTENTION),
                ("SDPA cuDNN", SDPBackend.CUDNN_ATTENTION),
            ):
                if bench.has_time(5) and not (bench.is_smoke and "cuDNN" in peer):
                    name = f"{title}, {peer}"
                    found = bench.attempt(
                        name,
                        "TFLOP/s",
                        partial(_sdpa, bench, shape, length, name, backend),
                    )
                    _beside(bench, shape, length, title, peer, ours, found)


def run_flex(bench: Bench) -> None:
    """FlexAttention, compiled, with a causal mask of blocks."""
    for length in LENGTHS:
        title = f"prefill attention 8B, {length // 1024}k, FlexAttention"
        if bench.is_smoke:
            bench.row(Row(title, "TFLOP/s", note="compiled on a card only"))
        elif bench.has_time(20):
            bench.attempt(title, "TFLOP/s", partial(_flex, bench, length, title))


def _beside(
    bench: Bench, shape: ModelShape, length: int, title: str, peer: str, ours: Row | None, found: Row | None
) -> None:
    """Both as times, so that a share above 100 % is a lead over the peer."""
    if ours is None or found is None or not ours.measured or not found.measured:
        return
    flops = causal_attention_flops(shape.num_heads, shape.head_dim, bench.pick(length, 40))
    times = [flops / row.measured / 1e9 for row in (ours, found)]
    bench.row(Row(f"{title} beside {peer}", "ms", times[0], times[1], ours.spread))


def _row(bench: Bench, title: str, flops: float, call: Callable[[], object], *, is_headline: bool = False) -> Row:
    timing = time_calls(bench, [call], is_headline=is_headline)
    rate = flops / timing.median_s / 1e12
    note = f"{timing.median_s * 1e3:.3f} ms"
    return Row(title, "TFLOP/s", rate, bench.ceilings.get("bf16 product TFLOP/s"), timing.spread, note)


def _ours(bench: Bench, shape: ModelShape, length: int, title: str) -> Row:
    length = bench.pick(length, 40)
    batch = make_batch(bench, shape, [(length, length)])
    flops = causal_attention_flops(shape.num_heads, shape.head_dim, length)
    return _row(bench, title, flops, batch.attend, is_headline=shape is LLAMA_8B)


def _chunk(bench: Bench, shape: ModelShape, length: int, title: str) -> Row:
    """A later chunk of a prompt, as chunked prefill computes it."""
    length, chunk = bench.pick((length, LENGTHS[1]), (40, 9))
    batch = make_batch(bench, shape, [(chunk, length)])
    pairs = chunk * (length - chunk) + chunk * chunk / 2
    return _row(bench, title, 4.0 * shape.num_heads * shape.head_dim * pairs, batch.attend)


def _sides(bench: Bench, shape: ModelShape, length: int) -> list[torch.Tensor]:
    heads = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
    return [torch.randn(1, n, length, shape.head_dim, dtype=bench.dtype, device=bench.device) for n in heads]


def _sdpa(bench: Bench, shape: ModelShape, length: int, title: str, backend: SDPBackend) -> Row:
    length = bench.pick(length, 40)
    query, key, value = _sides(bench, shape, length)
    flops = causal_attention_flops(shape.num_heads, shape.head_dim, length)

    def attend() -> torch.Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)

    try:
        attend()
    except RuntimeError:  # the backend does not share KV heads; copies of them cost it memory, hardly time
        key, value = (side.repeat_interleave(shape.num_heads // shape.num_kv_heads, 1) for side in (key, value))
    return _row(bench, title, flops, attend)


def _flex(bench: Bench, length: int, title: str) -> Row:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    query, key, value = _sides(bench, LLAMA_8B, length)
    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, length, length, device=str(bench.device))
    compiled = torch.compile(flex_attention, dynamic=False)
    flops = causal_attention_flops(LLAMA_8B.num_heads, LLAMA_8B.head_dim, length)
    return _row(bench, title, flops, lambda: compiled(query, key, value, block_mask=mask, enable_gqa=True))
