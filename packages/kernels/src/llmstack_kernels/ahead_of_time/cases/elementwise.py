"""Compile cases of activations, embeddings, norms and recurrences."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from llmstack_kernels.activation import triton as activation
from llmstack_kernels.ahead_of_time.case import CompileCase, meta_tensor
from llmstack_kernels.causal_convolution import triton as convolution
from llmstack_kernels.embedding import triton as embedding
from llmstack_kernels.gated_delta_rule import DeltaRuleInputs
from llmstack_kernels.gated_delta_rule import triton as delta_rule
from llmstack_kernels.layer_norm import triton as layer_norm
from llmstack_kernels.rms_norm import triton as rms_norm
from llmstack_kernels.selective_scan import SelectiveInputs
from llmstack_kernels.selective_scan import triton as selective
from llmstack_kernels.state_rows import StateRows
from llmstack_kernels.state_space_scan import ScanInputs
from llmstack_kernels.state_space_scan import triton as scan


def _activation_cases() -> Iterator[CompileCase]:
    """Feed-forward layers of Llama 8B, Gemma and GPT-2; logits that Gemma caps."""
    x = meta_tensor(64, 2 * 14336)
    yield CompileCase("silu_and_mul_8b_bf16", partial(activation.silu_and_mul, x), is_sample=True)
    yield CompileCase("gelu_tanh_and_mul_bf16", partial(activation.gelu_tanh_and_mul, meta_tensor(64, 2 * 16384)))
    pairs = meta_tensor(64, 2 * 2880)
    yield CompileCase("clamped_swiglu_bf16", partial(activation.clamped_swiglu, pairs, 1.702, 7.0), is_sample=True)
    hidden = meta_tensor(64, 4096)
    yield CompileCase("sigmoid_gate_bf16", partial(activation.sigmoid_gate, hidden, hidden), is_sample=True)
    for name in ("gelu_tanh", "gelu", "relu", "relu_squared"):
        yield CompileCase(f"{name}_gpt2_bf16", partial(getattr(activation, name), meta_tensor(64, 3072)))
    logits = torch.empty((64, 256_000), device="meta")
    yield CompileCase("soft_cap_f32", partial(activation.soft_cap_, logits, 30.0), is_sample=True)


def _embedding_cases() -> Iterator[CompileCase]:
    """Tokens and positions of GPT-2, tokens of Llama 8B."""
    ids = torch.empty(64, dtype=torch.int64, device="meta")
    positions, tokens = meta_tensor(1024, 768), meta_tensor(64, 768)
    yield CompileCase("add_gpt2_bf16", partial(embedding.embedding, ids, positions, tokens, 1.0))
    yield CompileCase(
        "8b_bf16", partial(embedding.embedding, ids, meta_tensor(128_256, 4096), None, 1.0), is_sample=True
    )


def _causal_convolution_cases() -> Iterator[CompileCase]:
    """A layer of LFM2 1.2B, and the channels of a delta net of Qwen3-Next."""
    for name, length, channels, function in (("lfm2", 3, 2048, "none"), ("next", 4, 8192, "silu")):
        taps = torch.empty((length, channels), device="meta")
        tails = meta_tensor(16, length - 1, channels)
        call = partial(
            convolution.causal_convolution, meta_tensor(64, channels), taps, None, tails, _state_rows(), function
        )
        yield CompileCase(f"{name}_bf16", call, is_sample=name == "lfm2")


def _gated_delta_rule_cases() -> Iterator[CompileCase]:
    """The heads of a layer of Qwen3-Next, and of one of Kimi Linear, whose rows have their own decays."""
    gate, head = meta_tensor(64, 32), torch.empty(32, device="meta")
    inputs = DeltaRuleInputs(meta_tensor(64, 8192), gate, gate, head, head, 16)
    matrices = torch.empty((16, 32, 128, 128), device="meta")
    call = partial(delta_rule.gated_delta_rule, inputs, matrices, _state_rows())
    yield CompileCase("next_bf16", call, is_sample=True)
    decays, bias = meta_tensor(64, 4096), torch.empty(4096, device="meta")
    inputs = DeltaRuleInputs(meta_tensor(64, 12288), decays, gate, head, bias, 32)
    yield CompileCase("kimi_bf16", partial(delta_rule.gated_delta_rule, inputs, matrices, _state_rows()))


def _state_space_scan_cases() -> Iterator[CompileCase]:
    """The heads of a layer of Granite 4 H Small."""
    steps, head = meta_tensor(64, 128), torch.empty(128, device="meta")
    inputs = ScanInputs(meta_tensor(64, 8448), steps, head, head, head, 1)
    states = torch.empty((16, 128, 128, 64), device="meta")
    yield CompileCase("granite_bf16", partial(scan.state_space_scan, inputs, states, _state_rows()), is_sample=True)


def _selective_scan_cases() -> Iterator[CompileCase]:
    """The channels of a layer of Falcon Mamba 7B."""
    x, small, channels = meta_tensor(64, 8192), meta_tensor(64, 16), torch.empty(8192, device="meta")
    states = torch.empty((16, 16, 8192), device="meta")
    inputs = SelectiveInputs(x, x, small, small, states[0], channels, channels)
    call = partial(selective.selective_scan, inputs, states, _state_rows())
    yield CompileCase("falcon_mamba_bf16", call, is_sample=True)


def _state_rows() -> StateRows:
    number = torch.empty(8, dtype=torch.int64, device="meta")
    return StateRows(torch.empty(9, dtype=torch.int32, device="meta"), number, number, number)


def _layer_norm_cases() -> Iterator[CompileCase]:
    """Hidden sizes of GPT-2 and of Falcon 7B, whose norms lack power-of-two rows."""
    for name, size in (("gpt2", 768), ("falcon_7b", 4544)):
        x, weight = meta_tensor(64, size), meta_tensor(size)
        call = partial(layer_norm.layer_norm, x, weight, weight, 1e-5)
        yield CompileCase(f"{name}_bf16", call, name == "gpt2", {"_layer_norm_kernel": ("pdl",)})
        yield CompileCase(f"add_{name}_bf16", partial(layer_norm.fused_add_layer_norm, x, x, weight, weight, 1e-5))


def _rms_norm_cases() -> Iterator[CompileCase]:
    """Hidden sizes of Llama 1B and 8B, and the heads of Qwen 3."""
    for name, size in (("1b", 2048), ("8b", 4096)):
        x, weight = meta_tensor(64, size), meta_tensor(size)
        call = partial(rms_norm.fused_add_rms_norm, x, x, weight, 1e-5)
        yield CompileCase(f"add_{name}_bf16", call, name == "8b", {"_rms_norm_kernel": ("pdl",)})
        yield CompileCase(f"{name}_bf16", partial(rms_norm.rms_norm, x, weight, 1e-5))
    heads = meta_tensor(64, 48, 128)[:, :32]
    yield CompileCase("heads_128_bf16", partial(rms_norm.rms_norm, heads, meta_tensor(128), 1e-5))
    gated = partial(rms_norm.gated_rms_norm, heads, heads, meta_tensor(128), 1e-5, False)
    yield CompileCase("gated_heads_128_bf16", gated, is_sample=True)


CASES: dict[str, Callable[[], Iterator[CompileCase]]] = {
    "activation": _activation_cases,
    "causal_convolution": _causal_convolution_cases,
    "embedding": _embedding_cases,
    "gated_delta_rule": _gated_delta_rule_cases,
    "layer_norm": _layer_norm_cases,
    "rms_norm": _rms_norm_cases,
    "selective_scan": _selective_scan_cases,
    "state_space_scan": _state_space_scan_cases,
}
