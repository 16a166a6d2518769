"""Compile cases of attention, rotary embedding and KV writes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from llmstack_kernels.ahead_of_time.case import Claim, CompileCase, meta_tensor
from llmstack_kernels.bidirectional_attention import triton as bidirectional_attention
from llmstack_kernels.paged_attention import AttentionInputs
from llmstack_kernels.paged_attention import triton as paged_attention
from llmstack_kernels.reshape_and_cache import triton as reshape_and_cache
from llmstack_kernels.rotary_and_cache import RotaryInputs
from llmstack_kernels.rotary_and_cache import triton as rotary_and_cache
from llmstack_kernels.rotary_embedding import triton as rotary_embedding


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
    has_sinks: bool = False

    @property
    def claims(self) -> dict[str, tuple[Claim, ...]]:
        """Claims about all kernels; float32 goes past the tensor cores, which would round it."""
        prefill: tuple[Claim, ...] = ("pdl",) if self.dtype == torch.float32 else ("pdl", "wgmma")
        return {"_decode_kernel": ("pdl",), "_combine_kernel": ("pdl",), "_prefill_kernel": prefill}

    def attend(
        self, num_rows: int, num_tokens: int, max_query_len: int, *, decodes_as_prefills: bool = False
    ) -> torch.Tensor:
        """A call with rows of up to 8192 tokens, whose queries are slices of a projection."""
        width = self.num_heads + 2 * self.num_kv_heads
        query = meta_tensor(num_tokens, width, self.head_dim, dtype=self.dtype)[:, : self.num_heads]
        cache_shape = (4096, self.num_kv_heads, 16, self.head_dim)
        cache = meta_tensor(*cache_shape, dtype=self.cache_dtype or self.dtype)
        scales = meta_tensor(self.num_kv_heads, dtype=torch.float32) if self.cache_dtype else None
        return paged_attention.paged_attention(
            AttentionInputs(
                query,
                cache,
                cache,
                meta_tensor(num_rows + 1, dtype=torch.int32),
                meta_tensor(num_rows, dtype=torch.int32),
                meta_tensor(num_rows, 512, dtype=torch.int32),
                self.head_dim**-0.5,
                max_query_len=max_query_len,
                sliding_window=self.sliding_window,
                soft_cap=self.soft_cap,
                alibi_slopes=meta_tensor(self.num_heads, dtype=torch.float32) if self.has_slopes else None,
                sinks=meta_tensor(self.num_heads, dtype=torch.float32) if self.has_sinks else None,
                key_scale=scales,
                value_scale=scales,
                decodes_as_prefills=decodes_as_prefills,
            )
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
    "gpt_oss_bf16": _Layer(64, 8, 64, sliding_window=128, has_sinks=True),
    "falcon_bf16": _Layer(71, 1, 64),
    "falcon_fp32": _Layer(71, 1, 64, torch.float32),
    "phi_bf16": _Layer(32, 32, 80),
    "8b_bf16_fp8_cache": _Layer(32, 8, 128, cache_dtype=torch.float8_e4m3fn),
    "1b_bf16_fp8_cache": _Layer(32, 8, 64, cache_dtype=torch.float8_e4m3fn),
    "phi_bf16_fp8_cache": _Layer(32, 32, 80, cache_dtype=torch.float8_e4m3fn),
}

# Its prefill spills some registers whatever the tiles, and is not held to the rule.
_GEMMA_FLOAT8 = _Layer(16, 8, 256, cache_dtype=torch.float8_e4m3fn, sliding_window=4096, soft_cap=50.0)


def _paged_attention_cases() -> Iterator[CompileCase]:
    """Decodes of 64 rows, and prefills of two rows, of models and of the options they do not have."""
    for name, layer in _LAYERS.items():
        min_arch = 90 if layer.cache_dtype else 80
        yield CompileCase(f"decode_{name}", partial(layer.attend, 64, 64, 1), min_arch=min_arch)
        # Without lists of lengths there may be decodes among the rows, so this starts all kernels.
        prefill = partial(layer.attend, 2, 4096, 4096)
        yield CompileCase(f"prefill_{name}", prefill, name == "8b_bf16", layer.claims, min_arch)
    yield CompileCase("decode_gemma_bf16_fp8_cache", partial(_GEMMA_FLOAT8.attend, 64, 64, 1), min_arch=90)
    as_prefills = partial(_LAYERS["8b_bf16"].attend, 64, 64, 1, decodes_as_prefills=True)
    for name, num_heads, dtype in (
        ("v3_bf16", 128, torch.bfloat16),
        ("v2_lite_fp16", 16, torch.float16),
        ("v2_lite_fp32", 16, torch.float32),
    ):
        latent = partial(_attend_latents, num_heads, 64, dtype)
        yield CompileCase(f"latent_{name}", latent, name == "v3_bf16", {"_latent_kernel": ("pdl",)})
    latent = partial(_attend_latents, 128, 64, torch.bfloat16, torch.float8_e4m3fn)
    yield CompileCase("latent_v3_bf16_fp8_cache", latent, min_arch=90)
    yield CompileCase("decode_as_prefill_8b_bf16", as_prefills, claims={"_prefill_kernel": ("pdl", "wgmma")})


def _attend_latents(
    num_heads: int, num_tokens: int, dtype: torch.dtype, cache_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Decodes over latents of DeepSeek's shape: 512 numbers of a value, 64 more of a key."""
    cache = meta_tensor(4096, 1, 16, 576, dtype=cache_dtype or dtype)
    scale = meta_tensor(1, dtype=torch.float32) if cache_dtype else None
    return paged_attention.paged_attention(
        AttentionInputs(
            meta_tensor(num_tokens, num_heads, 576, dtype=dtype),
            cache,
            cache[..., :512],
            meta_tensor(num_tokens + 1, dtype=torch.int32),
            meta_tensor(num_tokens, dtype=torch.int32),
            meta_tensor(num_tokens, 512, dtype=torch.int32),
            192**-0.5,
            max_query_len=1,
            key_scale=scale,
            value_scale=scale,
        )
    )


def _bidirectional_attention_cases() -> Iterator[CompileCase]:
    """Towers of SigLIP and Qwen2.5-VL with its windows, encoders of Whisper, a text model; queries of a projection."""
    for name, num_heads, head_dim, length, dtype in (
        ("siglip_bf16", 16, 72, 729, torch.bfloat16),
        ("qwen2_5_vl_windows_bf16", 16, 80, 64, torch.bfloat16),
        ("whisper_fp16", 20, 64, 1500, torch.float16),
        ("whisper_fp32", 6, 64, 1500, torch.float32),
        ("siglip_fp32", 16, 72, 729, torch.float32),
        ("128_bf16", 16, 128, 1024, torch.bfloat16),
        ("256_bf16", 8, 256, 1024, torch.bfloat16),
    ):
        kernel = "_bidirectional_attention_kernel"
        claims: tuple[Claim, ...] = ("pdl",) if dtype == torch.float32 else ("pdl", "wgmma")
        query, key, value = meta_tensor(4 * length, 3, num_heads, head_dim, dtype=dtype).unbind(1)
        starts, scale = range(0, 4 * length + 1, length), head_dim**-0.5
        call = partial(bidirectional_attention.bidirectional_attention, query, key, value, starts, scale)
        yield CompileCase(name, call, name == "whisper_fp16", {kernel: claims})


def _reshape_and_cache_cases() -> Iterator[CompileCase]:
    """Keys and values as slices of the projections of GPT-2 and Llama 8B; the latter into 8 bits, too."""
    pdl: dict[str, tuple[Claim, ...]] = {"_reshape_and_cache_kernel": ("pdl",)}
    gpt2, llama = (meta_tensor(64, 36, 64), 12, 12), (meta_tensor(64, 48, 128), 32, 8)
    yield CompileCase("gpt2_bf16", partial(_write, *gpt2, torch.bfloat16), claims=pdl)
    yield CompileCase("8b_bf16", partial(_write, *llama, torch.bfloat16), True, pdl)
    yield CompileCase("8b_bf16_fp8_cache", partial(_write, *llama, torch.float8_e4m3fn), claims=pdl, min_arch=90)


def _write(projection: torch.Tensor, num_heads: int, num_kv_heads: int, cache_dtype: torch.dtype) -> None:
    key = projection[:, num_heads : num_heads + num_kv_heads]
    value = projection[:, num_heads + num_kv_heads :]
    cache = meta_tensor(4096, num_kv_heads, 16, projection.shape[2], dtype=cache_dtype)
    scales = meta_tensor(num_kv_heads, dtype=torch.float32) if cache_dtype == torch.float8_e4m3fn else None
    slots = meta_tensor(projection.shape[0], dtype=torch.int64)
    reshape_and_cache.reshape_and_cache(key, value, cache, cache, slots, scales, scales)


def _rotary_embedding_cases() -> Iterator[CompileCase]:
    """Heads of Llama 8B and 1B, and those of Phi-2, which are rotated partly."""
    for name, num_heads, num_kv_heads, head_dim, rotary_dim in (
        ("8b", 32, 8, 128, 128),
        ("1b", 32, 8, 64, 64),
        ("phi2", 32, 32, 80, 32),
    ):
        positions = torch.empty(64, dtype=torch.int64, device="meta")
        qkv = torch.empty((64, num_heads + 2 * num_kv_heads, head_dim), dtype=torch.bfloat16, device="meta")
        query, key, _ = qkv.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
        table = torch.empty((8192, rotary_dim), device="meta")
        call = partial(rotary_embedding.rotary_embedding, positions, query, key, table)
        yield CompileCase(f"{name}_bf16", call, is_sample=name == "8b")


def _rotary_and_cache_cases() -> Iterator[CompileCase]:
    """Heads of Llama 8B and 1B, and those of Phi-2, which are rotated partly; keys and values of 8 bits."""
    for name, num_heads, num_kv_heads, head_dim, rotary_dim in (
        ("8b", 32, 8, 128, 128),
        ("1b", 32, 8, 64, 64),
        ("phi2", 32, 32, 80, 32),
    ):
        inputs = _rotary_tensors(num_heads, num_kv_heads, head_dim, rotary_dim)
        cache = meta_tensor(1024, num_kv_heads, 16, head_dim)
        call = partial(rotary_and_cache.rotary_and_cache, RotaryInputs(*inputs, cache, cache, _indices()))
        yield CompileCase(f"{name}_bf16", call, name == "8b", {"_rotary_and_cache_kernel": ("pdl",)})
    inputs, cache, norm = _rotary_tensors(32, 8, 128, 128), meta_tensor(1024, 8, 16, 128), meta_tensor(128)
    call = partial(
        rotary_and_cache.rotary_and_cache,
        RotaryInputs(*inputs, cache, cache, _indices(), query_norm=norm, key_norm=norm, eps=1e-6),
    )
    yield CompileCase("qwen3_8b_bf16", call)
    scale = meta_tensor(8, dtype=torch.float32)
    cache = meta_tensor(1024, 8, 16, 128, dtype=torch.float8_e4m3fn)
    inputs = _rotary_tensors(32, 8, 128, 128)
    call = partial(rotary_and_cache.rotary_and_cache, RotaryInputs(*inputs, cache, cache, _indices(), scale, scale))
    yield CompileCase("8b_bf16_fp8", call, min_arch=90)


def _rotary_tensors(
    num_heads: int, num_kv_heads: int, head_dim: int, rotary_dim: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    qkv = meta_tensor(64, num_heads + 2 * num_kv_heads, head_dim)
    query, key, value = qkv.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    return _indices(), query, key, value, meta_tensor(8192, rotary_dim, dtype=torch.float32)


def _indices() -> torch.Tensor:
    return meta_tensor(64, dtype=torch.int64)


CASES: dict[str, Callable[[], Iterator[CompileCase]]] = {
    "bidirectional_attention": _bidirectional_attention_cases,
    "paged_attention": _paged_attention_cases,
    "reshape_and_cache": _reshape_and_cache_cases,
    "rotary_and_cache": _rotary_and_cache_cases,
    "rotary_embedding": _rotary_embedding_cases,
}
