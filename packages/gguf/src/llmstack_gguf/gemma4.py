"""Gemma 4: names of tensors, and fields of its configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from llmstack_gguf.header import GGUFError, Header
from llmstack_gguf.layer_names import AROUND, ATTENTION, ENDS, EXPERTS, GATED, HEAD_NORMS, LLAMA
from llmstack_gguf.variants import Values

GEMMA_4 = replace(
    LLAMA,
    class_name="Gemma4ForCausalLM",
    model_type="gemma4_text",
    layer={
        **ATTENTION,
        **HEAD_NORMS,
        **GATED,
        **AROUND,
        **{part: name.replace("mlp.", "", 1) for part, name in EXPERTS.items()},
        "ffn_gate_inp": "router.proj",
        "ffn_gate_inp.scale": "router.scale",
        "ffn_down_exps.scale": "router.per_expert_scale",
        "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
        "post_ffw_norm_1": "post_feedforward_layernorm_1",
        "post_ffw_norm_2": "post_feedforward_layernorm_2",
        "layer_output_scale.weight": "layer_scalar",
        "inp_gate": "per_layer_input_gate",
        "proj": "per_layer_projection",
        "post_norm": "post_per_layer_input_norm",
    },
    ends={
        **ENDS,
        "per_layer_token_embd": "model.embed_tokens_per_layer",
        "per_layer_model_proj": "model.per_layer_model_projection",
        "per_layer_proj_norm": "model.per_layer_projection_norm",
    },
    interleaves_heads=False,
)
_KINDS = ("full_attention", "sliding_attention")


def gemma_4_fields(header: Header, values: Values, rope_factors: Sequence[float] | None) -> dict[str, Any]:
    """The fields of Gemma 4. `rope_factors` are those of layers without a window: 1 for frequencies that are used."""
    num_layers = values.num_layers()
    have_windows = [bool(one) for one in values.integers("attention.sliding_window_pattern", num_layers)]
    kinds = [_KINDS[has_window] for has_window in have_windows]
    fields: dict[str, Any] = {
        "hidden_size": values.integer("embedding_length"),
        "num_hidden_layers": num_layers,
        "num_attention_heads": values.integer("attention.head_count"),
        "layer_types": kinds,
        "sliding_window": values.integer("attention.sliding_window"),
        "max_position_embeddings": values.integer("context_length"),
        "rms_norm_eps": values.number("attention.layer_norm_rms_epsilon"),
        "hidden_activation": "gelu_pytorch_tanh",
        "num_kv_shared_layers": values.integer("attention.shared_kv_layers", 0),
        "final_logit_softcapping": values.number("final_logit_softcapping", 0.0) or None,
        "head_dim": values.integer("attention.key_length_swa"),
        "global_head_dim": values.integer("attention.key_length"),
        "rope_parameters": _ropes(values, rope_factors),
    }
    return (
        fields
        | _widths(values, num_layers)
        | _heads(header, values, have_windows)
        | _inputs_and_experts(header, values)
    )


def _widths(values: Values, num_layers: int) -> dict[str, Any]:
    """The width of the feed-forward, which may be twice as large in layers that read keys and values of others."""
    widths = values.integers("feed_forward_length", num_layers)
    first_reader = num_layers - values.integer("attention.shared_kv_layers", 0)
    own = widths[0] if widths else 0
    is_double = any(width != own for width in widths)
    if widths != [own * (1 + (is_double and number >= first_reader)) for number in range(num_layers)]:
        raise GGUFError("its feed-forward layers are of different widths.")
    return {"intermediate_size": own, "use_double_wide_mlp": is_double}


def _heads(header: Header, values: Values, have_windows: Sequence[bool]) -> dict[str, Any]:
    """Numbers of heads of keys and values by kind of layer; where values are keys, files have no values."""
    counts = values.integers("attention.head_count_kv", len(have_windows))
    by_kind = [
        {count for count, own in zip(counts, have_windows, strict=True) if own is kind} for kind in (True, False)
    ]
    if any(len(kind) > 1 for kind in by_kind):
        raise GGUFError("layers of one kind have different numbers of heads of keys and values.")
    (with_window, without) = (next(iter(kind), None) for kind in by_kind)
    have_values = {
        f"blk.{number}.attn_v.weight" in header.tensors
        for number, has_window in enumerate(have_windows)
        if not has_window and f"blk.{number}.attn_k.weight" in header.tensors
    }
    if len(have_values) > 1:
        raise GGUFError("some of its layers without a window have values, and others have not.")
    are_keys = have_values == {False}
    if without != with_window and None not in (without, with_window) and not are_keys:
        raise GGUFError("layers with and without a window have different numbers of heads, and values of their own.")
    return {
        "num_key_value_heads": with_window or without,
        "num_global_key_value_heads": without,
        "attention_k_eq_v": are_keys,
    }


def _inputs_and_experts(header: Header, values: Values) -> dict[str, Any]:
    table = header.tensors.get("per_layer_token_embd.weight")
    fields: dict[str, Any] = {
        "hidden_size_per_layer_input": values.integer("embedding_length_per_layer_input", 0) if table else 0,
        "enable_moe_block": "blk.0.ffn_gate_inp.weight" in header.tensors,
    }
    if table is not None:
        fields["vocab_size_per_layer_input"] = table.shape[0]
    if fields["enable_moe_block"]:
        fields |= {
            "num_experts": values.integer("expert_count"),
            "top_k_experts": values.integer("expert_used_count"),
            "moe_intermediate_size": values.integer("expert_feed_forward_length"),
        }
    return fields


def _ropes(values: Values, rope_factors: Sequence[float] | None) -> Mapping[str, Any]:
    if values.text("rope.scaling.type", "none") != "none":
        raise GGUFError("a scaling of RoPE is not supported for this architecture.")
    size = values.integer("attention.key_length")
    if values.integer("rope.dimension_count", size) != size or rope_factors is None:
        raise GGUFError("its layers without a window rotate heads in a way that is not supported.")
    if values.integer("rope.dimension_count_swa", 0) != values.integer("attention.key_length_swa"):
        raise GGUFError("rotation of a part of each head with a window is not supported for this architecture.")
    num_used = sum(factor == 1.0 for factor in rope_factors)
    if (
        len(rope_factors) != size // 2
        or any(f != 1.0 for f in rope_factors[:num_used])
        or any(f < 1e20 for f in rope_factors[num_used:])
    ):
        raise GGUFError("its factors of RoPE do not say which frequencies are used.")
    return {
        _KINDS[0]: {
            "rope_type": "proportional",
            "partial_rotary_factor": 2 * num_used / size,
            "rope_theta": values.number("rope.freq_base", 1e6),
        },
        _KINDS[1]: {"rope_type": "default", "rope_theta": values.number("rope.freq_base_swa", 1e4)},
    }
