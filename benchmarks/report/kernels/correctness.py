"""Compares every operation with float64: the error's norm over the result's, below 1e-2."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate, pairwise

import torch
import torch.nn.functional as F

from llmstack_kernels.activation import gelu_tanh, silu_and_mul
from llmstack_kernels.bidirectional_attention import bidirectional_attention
from llmstack_kernels.grouped_linear import group_rows, grouped_linear, pack_experts
from llmstack_kernels.layer_norm import fused_add_layer_norm
from llmstack_kernels.linear import QUANTIZATIONS, linear, pack_linear, quantize
from llmstack_kernels.rms_norm import fused_add_rms_norm
from report.bench import Bench
from report.floors import LLAMA_1B, LLAMA_8B, MODELS, ModelShape
from report.kernels.attention_inputs import make_batch, reference
from report.kernels.experts import NUM_EXPERTS, choose_experts
from report.rows import Row

MAX_ERROR = 1e-2
SUMMARY = "operations off by 1e-2 or more"

Check = Callable[[Bench], tuple[torch.Tensor, torch.Tensor]]
"""What the operation gave, and what float64 gives."""


def run(bench: Bench) -> None:
    """A row each, and how many of them are wrong; one that fails to run is."""
    num_wrong = num_checked = 0
    for name, check in checks(bench):
        num_checked += 1
        found = bench.attempt(f"error of {name}", "", partial(_row, bench, name, check))
        # Not `>=`: an error that is no number is one too.
        num_wrong += found is None or found.measured is None or not found.measured < MAX_ERROR
    bench.row(Row(SUMMARY, "wrong", float(num_wrong), note=f"of {num_checked}"))


def _row(bench: Bench, name: str, check: Check) -> Row:
    poison(bench)
    got, expected = check(bench)
    error = norm_error(got, expected)
    return Row(f"error of {name}", "", error, note="" if error < MAX_ERROR else "TOO LARGE")


def norm_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm of `expected`; not a number if anything in `got` is none."""
    return float((got.double() - expected).norm() / expected.norm())


def poison(bench: Bench) -> None:
    """Leaves memory full of NaN for the next to allocate, so that what it does not write shows."""
    for num_bytes in (1 << 12, 1 << 16, 1 << 20, 1 << 24, bench.pick(1 << 28, 1 << 20)):
        torch.full((num_bytes // 4,), torch.nan, dtype=torch.float32, device=bench.device)


def checks(bench: Bench) -> Iterator[tuple[str, Check]]:
    """All operations."""
    for shape in MODELS:
        yield f"decode attention {shape.name}", partial(_attention, shape=shape, lengths=[1, 17, 300, 1000])
        mixed = {"lengths": [40, 600], "query_lengths": [40, 5]}
        yield f"mixed attention {shape.name}", partial(_attention, shape=shape, **mixed)
    long = [bench.pick(3000, 40)]
    yield "long prefill attention 8B", partial(_attention, shape=LLAMA_8B, lengths=long, query_lengths=long)
    for shape in (LLAMA_1B, LLAMA_8B):
        narrow = {"lengths": [9, 700], "dtype": torch.float8_e4m3fn}
        yield f"decode attention {shape.name}, fp8 KV", partial(_attention, shape=shape, **narrow)
    rows = {"shape": LLAMA_8B, "lengths": [700, 90], "query_lengths": [1, 33]}
    yield "windowed attention 8B", partial(_attention, **rows, sliding_window=64)
    yield "capped attention 8B", partial(_attention, **rows, soft_cap=30.0)
    for name, num_heads, head_dim, lengths in (
        ("SigLIP", 16, 72, [729, 729]),
        ("Qwen2.5-VL windows", 16, 80, [64, 64, 48]),
        ("Whisper", 20, 64, [1500]),
    ):
        yield f"encoder attention {name}", partial(_encoder_attention, heads=(num_heads, head_dim), lengths=lengths)
    for num_rows in (1, 8, 64, 256):
        for scheme in (None, *QUANTIZATIONS):
            name = f"linear 14336 x 4096 {scheme or 'bf16'}, M = {num_rows}"
            yield name, partial(_linear, num_rows=num_rows, scheme=scheme)
    for num_tokens in (1, 64, 500):
        yield f"experts 8 x 1024 x 2048, {num_tokens} tokens", partial(_experts, num_tokens=num_tokens)
    yield "add + RMSNorm", _rms_norm
    yield "add + LayerNorm", _layer_norm
    yield "SiLU-mul", _silu
    yield "GELU", _gelu
    yield "rotary + cache write", _rotary


def _attention(
    bench: Bench,
    shape: ModelShape,
    lengths: list[int],
    query_lengths: list[int] | None = None,
    *,
    dtype: torch.dtype | None = None,
    **options: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    lengths = bench.pick(lengths, [min(length, 40) for length in lengths])
    rows = list(zip(query_lengths or [1] * len(lengths), lengths, strict=True))
    batch = make_batch(bench, shape, rows, kv_dtype=dtype)
    return batch.attend(**options), reference(batch, **options)


def _encoder_attention(bench: Bench, heads: tuple[int, int], lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    lengths = bench.pick(lengths, [min(length, 20) for length in lengths])
    starts, scale = [0, *accumulate(lengths)], heads[1] ** -0.5
    query, key, value = _random(bench, starts[-1], 3, *heads).unbind(1)
    rows = [
        F.scaled_dot_product_attention(*(tensor[start:end].double().transpose(0, 1) for tensor in (query, key, value)))
        for start, end in pairwise(starts)
    ]
    return bidirectional_attention(query, key, value, starts, scale), torch.cat(rows, 1).transpose(0, 1)


def _linear(bench: Bench, num_rows: int, scheme: str | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Against the weights as they were rounded: what rounding them costs is not the product's error."""
    out_features, in_features, num_rows = bench.pick((14336, 4096, num_rows), (48, 128, min(num_rows, 3)))
    weight = 0.02 * torch.randn(out_features, in_features, dtype=bench.dtype, device=bench.device)
    bias = torch.randn(out_features, dtype=bench.dtype, device=bench.device)
    x = torch.randn(num_rows, in_features, dtype=bench.dtype, device=bench.device)
    rounded = weight.double() if scheme is None else quantize(weight, scheme).dequantize(torch.float64)
    return linear(x, pack_linear(weight, bias, scheme)), x.double() @ rounded.t() + bias.double()


def _experts(bench: Bench, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Each token through two experts, one row for each."""
    out_features, in_features, num_tokens = bench.pick((1024, 2048, num_tokens), (64, 64, min(num_tokens, 3)))
    weights = 0.02 * _random(bench, NUM_EXPERTS, out_features, in_features)
    x, expert_ids = _random(bench, num_tokens, in_features), choose_experts(bench, num_tokens)
    got = grouped_linear(x, pack_experts(weights), group_rows(expert_ids, NUM_EXPERTS))
    rows = x.double().repeat_interleave(expert_ids.shape[1], 0)
    chosen = expert_ids.flatten()
    expected = torch.stack([weights[expert].double() @ row for expert, row in zip(chosen, rows, strict=True)])
    return got, expected


def _random(bench: Bench, *shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=bench.dtype, device=bench.device)


def _rms_norm(bench: Bench) -> tuple[torch.Tensor, torch.Tensor]:
    size = bench.pick(4096, 100)
    x, residual, weight = _random(bench, 7, size), _random(bench, 7, size), _random(bench, size)
    total = (x + residual).double()
    expected = total / (total.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    return fused_add_rms_norm(x, residual, weight, 1e-5)[0], expected


def _layer_norm(bench: Bench) -> tuple[torch.Tensor, torch.Tensor]:
    size = bench.pick(768, 100)
    x, residual = _random(bench, 7, size), _random(bench, 7, size)
    weight, bias = _random(bench, size), _random(bench, size)
    expected = F.layer_norm((x + residual).double(), (size,), weight.double(), bias.double(), 1e-5)
    return fused_add_layer_norm(x, residual, weight, bias, 1e-5)[0], expected


def _silu(bench: Bench) -> tuple[torch.Tensor, torch.Tensor]:
    x = _random(bench, 7, 2 * bench.pick(14336, 100))
    gate, up = x.double().chunk(2, -1)
    return silu_and_mul(x), F.silu(gate) * up


def _gelu(bench: Bench) -> tuple[torch.Tensor, torch.Tensor]:
    x = _random(bench, 7, bench.pick(3072, 100))
    return gelu_tanh(x), F.gelu(x.double(), approximate="tanh")


def _rotary(bench: Bench) -> tuple[torch.Tensor, torch.Tensor]:
    """The rotated queries and keys and the values, all in one tensor."""
    from llmstack_kernels.rotary_and_cache import RotaryInputs, rotary_and_cache

    num_tokens, num_heads, num_kv_heads, head_dim = bench.pick((33, 32, 8, 128), (5, 4, 2, 16))
    qkv = _random(bench, num_tokens, num_heads + 2 * num_kv_heads, head_dim)
    query, key, value = qkv.split([num_heads, num_kv_heads, num_kv_heads], 1)
    angles = torch.rand(64, head_dim // 2, dtype=torch.float64, device=bench.device) * 6
    cos_sin = torch.cat([angles.cos(), angles.sin()], 1).float()
    positions = torch.randint(0, 64, (num_tokens,), device=bench.device)
    caches = [
        torch.full((5, num_kv_heads, 16, head_dim), torch.nan, dtype=bench.dtype, device=bench.device) for _ in "kv"
    ]
    slots = torch.randperm(5 * 16, device=bench.device)[:num_tokens]
    rotated = rotary_and_cache(RotaryInputs(positions, query, key, value, cos_sin, *caches, slots))
    stored = [cache[slots // 16, :, slots % 16] for cache in caches]
    both = torch.cat([query, key], 1).double()
    cos, sin = (side[positions][:, None] for side in (angles.cos(), angles.sin()))
    first, second = both.chunk(2, -1)
    expected = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
    return torch.cat([rotated, *stored], 1), torch.cat([expected, value.double()], 1)
