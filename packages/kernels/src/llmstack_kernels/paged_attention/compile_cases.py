"""Attention of models as it is compiled ahead of time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from llmstack_kernels.ahead_of_time.case import Claim, CompileCase
from llmstack_kernels.paged_attention import triton as kernels


@dataclass(frozen=True, slots=True)
class _Layer:
    """Shape and kind of a layer's attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype = torch.bfloat16
    cache_dtype: torch.dtype | None = None  # None: the type of the queries
    sliding_window: int | None = None
    soft_cap: float | None = None
    has_slopes: bool = False

    @property
    def claims(self) -> dict[str, tuple[Claim, ...]]:
        """Of all kernels; float32 goes past the tensor cores, which would round it."""
        prefill: tuple[Claim, ...] = ("pdl",) if self.dtype == torch.float32 else ("pdl", "wgmma")
        return {"_decode_kernel": ("pdl",), "_combine_kernel": ("pdl",), "_prefill_kernel": prefill}

    def attend(
        self, num_rows: int, num_tokens: int, max_query_len: int, *, decodes_as_prefills: bool = False
    ) -> torch.Tensor:
        """A call with rows of up to 8192 tokens, whose queries are slices of a projection."""
        width = self.num_heads + 2 * self.num_kv_heads
        query = _empty(num_tokens, width, self.head_dim, dtype=self.dtype)[:, : self.num_heads]
        cache_shape = (4096, self.num_kv_heads, 16, self.head_dim)
        cache = _empty(*cache_shape, dtype=self.cache_dtype or self.dtype)
        scales = _empty(self.num_kv_heads, dtype=torch.float32) if self.cache_dtype else None
        return kernels.paged_attention(
            query,
            cache,
            cache,
            _empty(num_rows + 1, dtype=torch.int32),
            _empty(num_rows, dtype=torch.int32),
            _empty(num_rows, 512, dtype=torch.int32),
            self.head_dim**-0.5,
            max_query_len=max_query_len,
            sliding_window=self.sliding_window,
            soft_cap=self.soft_cap,
            alibi_slopes=_empty(self.num_heads, dtype=torch.float32) if self.has_slopes else None,
            key_scale=scales,
            value_scale=scales,
            decodes_as_prefills=decodes_as_prefills,
        )


_LAYERS = {
    "8b_bf16": _Layer(32, 8, 128),
    "1b_bf16": _Layer(32, 8, 64),
    "gpt2_bf16": _Layer(12, 12, 64),
    "gpt2_fp32": _Layer(12, 12, 64, torch.float32),
    "8b_fp16": _Layer(32, 8, 128, torch.float16),
    "8b_fp32": _Layer(32, 8, 128, torch.float32),
    "gemma_bf16": _Layer(16, 8, 256, sliding_window=4096, soft_cap=50.0),
    "gemma_fp32": _Layer(16, 8, 256, torch.float32, sliding_window=4096, soft_cap=50.0),
    "bloom_bf16": _Layer(32, 32, 128, has_slopes=True),
    "falcon_bf16": _Layer(71, 1, 64),
    "falcon_fp32": _Layer(71, 1, 64, torch.float32),
    "phi_bf16": _Layer(32, 32, 80),
    "8b_bf16_fp8_cache": _Layer(32, 8, 128, cache_dtype=torch.float8_e4m3fn),
    "1b_bf16_fp8_cache": _Layer(32, 8, 64, cache_dtype=torch.float8_e4m3fn),
    "phi_bf16_fp8_cache": _Layer(32, 32, 80, cache_dtype=torch.float8_e4m3fn),
}

# Its prefill spills some registers whatever the tiles, and is not held to the rule.
_GEMMA_FLOAT8 = _Layer(16, 8, 256, cache_dtype=torch.float8_e4m3fn, sliding_window=4096, soft_cap=50.0)


def cases() -> Iterator[CompileCase]:
    """Decodes of 64 rows, and prefills of two rows, of models and of the options they do not have."""
    for name, layer in _LAYERS.items():
        min_arch = 90 if layer.cache_dtype else 80
        yield CompileCase(f"decode_{name}", partial(layer.attend, 64, 64, 1), min_arch=min_arch)
        # Without lists of lengths there may be decodes among the rows, so this starts all kernels.
        prefill = partial(layer.attend, 2, 4096, 4096)
        yield CompileCase(f"prefill_{name}", prefill, name == "8b_bf16", layer.claims, min_arch)
    yield CompileCase("decode_gemma_bf16_fp8_cache", partial(_GEMMA_FLOAT8.attend, 64, 64, 1), min_arch=90)
    as_prefills = partial(_LAYERS["8b_bf16"].attend, 64, 64, 1, decodes_as_prefills=True)
    yield CompileCase("decode_as_prefill_8b_bf16", as_prefills, claims={"_prefill_kernel": ("pdl", "wgmma")})


def _empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
