"""Architectures with state spaces of Mamba-1: names of tensors, and fields."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from llmstack_gguf.header import GGUFError, Header
from llmstack_gguf.layer_names import ATTENTION, ENDS, EXPERTS, GATED, Architecture
from llmstack_gguf.variants import Values

_FORMS: Mapping[str, str] = {"ssm_a": "logs", "ssm_conv1d.weight": "taps"}
_PARTS: Mapping[str, str] = {
    "ssm_in": "in_proj",
    "ssm_conv1d": "conv1d",
    "ssm_x": "x_proj",
    "ssm_dt": "dt_proj",
    "ssm_a": "A_log",
    "ssm_d": "D",
    "ssm_out": "out_proj",
}
_MAMBA = Architecture(
    "MambaForCausalLM",
    "mamba",
    {"attn_norm": "norm", **{part: f"mixer.{name}" for part, name in _PARTS.items()}},
    ENDS,
    forms=_FORMS,
)
FALCON_MAMBA = replace(_MAMBA, class_name="FalconMambaForCausalLM", model_type="falcon_mamba")
"""Files of `mamba` whose steps, B and C are normalised."""
_NORMS: Mapping[str, str] = {
    "ssm_dt_norm": "mamba.dt_layernorm",
    "ssm_b_norm": "mamba.b_layernorm",
    "ssm_c_norm": "mamba.c_layernorm",
}
_JAMBA = Architecture(
    "JambaForCausalLM",
    "jamba",
    {**ATTENTION, **{part: f"mamba.{name}" for part, name in _PARTS.items()}, **_NORMS, **GATED, **EXPERTS},
    ENDS,
    forms=_FORMS,
)
SELECTIVE: Mapping[str, Architecture] = {"mamba": _MAMBA, "jamba": _JAMBA}


def is_normalised(header: Header) -> bool:
    """Whether a file of `mamba` is one of Falcon Mamba."""
    return header.metadata.get("mamba.ssm.dt_b_c_rms") is True


def mamba_fields(header: Header, values: Values) -> dict[str, Any]:
    """The fields of Mamba and of Falcon Mamba."""
    sizes = _sizes(values)
    return {
        "hidden_size": values.integer("embedding_length"),
        "num_hidden_layers": values.num_layers(),
        "max_position_embeddings": values.integer("context_length"),
        "layer_norm_epsilon": values.number("attention.layer_norm_rms_epsilon"),
        "expand": sizes["expand"],
        "state_size": sizes["d_state"],
        "time_step_rank": sizes["dt_rank"],
        "conv_kernel": sizes["d_conv"],
        "use_bias": "blk.0.ssm_in.bias" in header.tensors,
        "use_conv_bias": "blk.0.ssm_conv1d.bias" in header.tensors,
    }


def jamba_fields(header: Header, values: Values) -> dict[str, Any]:
    """The fields of Jamba; layers with attention, and those with experts, are the same distance apart."""
    num_layers, names = values.num_layers(), header.tensors
    counts = values.integers("attention.head_count_kv", num_layers)
    with_experts = [number for number in range(num_layers) if f"blk.{number}.ffn_gate_inp.weight" in names]
    fields: dict[str, Any] = {
        "hidden_size": values.integer("embedding_length"),
        "num_hidden_layers": num_layers,
        "num_attention_heads": values.integer("attention.head_count"),
        "num_key_value_heads": max(counts),
        "max_position_embeddings": values.integer("context_length"),
        "intermediate_size": values.integer("feed_forward_length"),
        "rms_norm_eps": values.number("attention.layer_norm_rms_epsilon"),
        **_places("attn", [number for number, count in enumerate(counts) if count], num_layers),
        **{f"mamba_{name}": size for name, size in _sizes(values).items()},
        "mamba_proj_bias": any(name.endswith(".ssm_in.bias") for name in names),
        "mamba_conv_bias": any(name.endswith(".ssm_conv1d.bias") for name in names),
    }
    if not with_experts:
        return fields | {"num_experts": 1}
    return fields | {
        "num_experts": values.integer("expert_count"),
        "num_experts_per_tok": values.integer("expert_used_count"),
        **_places("expert", with_experts, num_layers),
    }


def _sizes(values: Values) -> dict[str, int]:
    hidden_size, inner_size = values.integer("embedding_length"), values.integer("ssm.inner_size")
    if not hidden_size or inner_size % hidden_size:
        raise GGUFError(f"{inner_size} inner features are no multiple of {hidden_size}.")
    return {
        "expand": inner_size // hidden_size,
        "d_state": values.integer("ssm.state_size"),
        "dt_rank": values.integer("ssm.time_step_rank"),
        "d_conv": values.integer("ssm.conv_kernel"),
    }


def _places(kind: str, numbers: list[int], num_layers: int) -> dict[str, int]:
    """Period and offset of some layers, which must follow from these two numbers."""
    if not numbers:
        raise GGUFError(f"it has no layer of the kind {kind!r}.")
    period = numbers[1] - numbers[0] if len(numbers) > 1 else num_layers
    if numbers != [*range(numbers[0], num_layers, period)] or numbers[0] >= period:
        raise GGUFError(f"its layers of the kind {kind!r} are not the same distance apart.")
    return {f"{kind}_layer_period": period, f"{kind}_layer_offset": numbers[0]}


SELECTIVE_FIELDS: Mapping[str, Callable[[Header, Values], dict[str, Any]]] = {
    "mamba": mamba_fields,
    "jamba": jamba_fields,
}
