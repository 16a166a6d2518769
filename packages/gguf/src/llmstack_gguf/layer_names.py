"""The description of an architecture, and tensor names that several share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

FORMS: Mapping[str, str] = {
    "ssm_a": "log of negative",
    "ssm_d": "flat",
    "ssm_norm.weight": "flat",
    "ssm_conv1d.weight": "taps",
    "ffn_gate_inp_shexp.weight": "row",
    "shortconv.conv.weight": "taps",
}
"""Tensors of a layer that repositories have in another form (`Target.form`)."""
ENDS: Mapping[str, str] = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
ATTENTION: Mapping[str, str] = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
}
HEAD_NORMS: Mapping[str, str] = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
GATED: Mapping[str, str] = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
AROUND: Mapping[str, str] = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}

EXPERTS: Mapping[str, str] = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
SHARED_EXPERTS: Mapping[str, str] = {
    f"ffn_{part}_shexp": f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")
}


@dataclass(frozen=True, slots=True)
class Architecture:
    """The differences between the architectures.

    Attributes:
        class_name: Entry of `architectures` in `config.json`.
        model_type: The same of `model_type`.
        ends: Names of what is in no layer, of files and of repositories.
        layer: The same of a layer. `{}` is the number of an expert, of which the file has all in one tensor. A name
            with `.weight` or `.bias` is that of one tensor alone.
        layers: The prefix of names of layers in repositories.
        interleaves_heads: Whether rows of queries and keys are stored in the order of pairs that are rotated together.
        has_offset_norms: Whether scales of norms are stored as what they are, and in repositories without 1.
        is_transposed: Whether repositories store matrices of layers as [inputs, outputs].
        groups_heads: Whether rows of `attn_qkv` are grouped by key-value heads in repositories.
        partners: Tensors of a layer that repositories have in one with another tensor.
        forms: Tensors of a layer that repositories have in another form.
    """

    class_name: str
    model_type: str
    layer: Mapping[str, str]
    ends: Mapping[str, str]
    layers: str = "model.layers."
    interleaves_heads: bool = False
    has_offset_norms: bool = False
    is_transposed: bool = False
    groups_heads: bool = False
    partners: Mapping[str, str] = field(default_factory=dict)
    forms: Mapping[str, str] = field(default_factory=lambda: FORMS)


LLAMA = Architecture("LlamaForCausalLM", "llama", {**ATTENTION, **GATED}, ENDS, interleaves_heads=True)
