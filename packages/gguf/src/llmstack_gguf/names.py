"""Architectures of GGUF files, and what their tensors are called in repositories."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from llmstack_gguf.header import GGUFError, Header
from llmstack_gguf.hybrids import FALCON_H1, FORMS, GRANITE, LFM2, NEMOTRON, QWEN_35

_ENDS: Mapping[str, str] = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_ATTENTION: Mapping[str, str] = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
}
_HEAD_NORMS: Mapping[str, str] = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_GATED: Mapping[str, str] = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_AROUND: Mapping[str, str] = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}

_TO_4H: Mapping[str, str] = {
    "attn_norm": "input_layernorm",
    "ffn_up": "mlp.dense_h_to_4h",
    "ffn_down": "mlp.dense_4h_to_h",
}
_SELF_ATTENTION: Mapping[str, str] = {
    "attn_qkv": "self_attention.query_key_value",
    "attn_output": "self_attention.dense",
}
_WORD_ENDS: Mapping[str, str] = {
    "token_embd": "transformer.word_embeddings",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
}
_STACKS = "mlp.experts."


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
        partners: Tensors of a layer whose rows repositories have in turns with those of another one.
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


_LLAMA = Architecture("LlamaForCausalLM", "llama", {**_ATTENTION, **_GATED}, _ENDS, interleaves_heads=True)
_QWEN_3 = replace(
    _LLAMA,
    class_name="Qwen3ForCausalLM",
    model_type="qwen3",
    layer={**_ATTENTION, **_HEAD_NORMS, **_GATED},
    interleaves_heads=False,
)
_QWEN_2 = replace(_LLAMA, class_name="Qwen2ForCausalLM", model_type="qwen2", interleaves_heads=False)
_QWEN_3_MOE = replace(
    _QWEN_3,
    class_name="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    layer={
        **_ATTENTION,
        **_HEAD_NORMS,
        "ffn_gate_inp": "mlp.gate",
        "ffn_gate_exps": "mlp.experts.{}.gate_proj",
        "ffn_up_exps": "mlp.experts.{}.up_proj",
        "ffn_down_exps": "mlp.experts.{}.down_proj",
    },
)
_GEMMA = replace(
    _LLAMA, class_name="GemmaForCausalLM", model_type="gemma", interleaves_heads=False, has_offset_norms=True
)
_GEMMA_2 = replace(
    _GEMMA, class_name="Gemma2ForCausalLM", model_type="gemma2", layer={**_ATTENTION, **_GATED, **_AROUND}
)
_FALCON = Architecture(
    "FalconForCausalLM",
    "falcon",
    {**_TO_4H, **_SELF_ATTENTION},
    _WORD_ENDS,
    layers="transformer.h.",
    groups_heads=True,
)
_NEMOTRON = replace(
    _LLAMA, class_name="NemotronHForCausalLM", model_type="nemotron_h", layer=NEMOTRON, interleaves_heads=False
)
_LFM2 = replace(
    _LLAMA,
    class_name="Lfm2ForCausalLM",
    model_type="lfm2",
    layer=LFM2,
    ends={**_ENDS, "token_embd_norm": "model.embedding_norm", "output_norm": "model.embedding_norm"},
    interleaves_heads=False,
)
_QWEN_35 = replace(
    _QWEN_3,
    class_name="Qwen3_5ForCausalLM",
    model_type="qwen3_5_text",
    layer={**_QWEN_3.layer, **QWEN_35},
    has_offset_norms=True,
)
ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": _LLAMA,
    "qwen2": _QWEN_2,
    "qwen3": _QWEN_3,
    "qwen3moe": _QWEN_3_MOE,
    "gemma": _GEMMA,
    "gemma2": _GEMMA_2,
    "gemma3": replace(
        _GEMMA_2,
        class_name="Gemma3ForCausalLM",
        model_type="gemma3_text",
        layer={**_ATTENTION, **_HEAD_NORMS, **_GATED, **_AROUND},
    ),
    "phi2": Architecture(
        "PhiForCausalLM",
        "phi",
        {**_ATTENTION, "attn_output": "self_attn.dense", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"},
        {**_ENDS, "output_norm": "model.final_layernorm"},
    ),
    "phi3": Architecture(
        "Phi3ForCausalLM",
        "phi3",
        {
            "attn_norm": "input_layernorm",
            "attn_qkv": "self_attn.qkv_proj",
            "attn_output": "self_attn.o_proj",
            "ffn_norm": "post_attention_layernorm",
            "ffn_up": "mlp.gate_up_proj",
            "ffn_down": "mlp.down_proj",
        },
        _ENDS,
    ),
    "gpt2": Architecture(
        "GPT2LMHeadModel",
        "gpt2",
        {
            "attn_norm": "ln_1",
            "attn_qkv": "attn.c_attn",
            "attn_output": "attn.c_proj",
            "ffn_norm": "ln_2",
            "ffn_up": "mlp.c_fc",
            "ffn_down": "mlp.c_proj",
        },
        {
            "token_embd": "transformer.wte",
            "position_embd": "transformer.wpe",
            "output_norm": "transformer.ln_f",
            "output": "lm_head",
        },
        layers="transformer.h.",
        is_transposed=True,
    ),
    "stablelm": Architecture("StableLmForCausalLM", "stablelm", {**_ATTENTION, **_GATED}, _ENDS),
    "gptneox": Architecture(
        "GPTNeoXForCausalLM",
        "gpt_neox",
        {
            **_TO_4H,
            "ffn_norm": "post_attention_layernorm",
            "attn_qkv": "attention.query_key_value",
            "attn_output": "attention.dense",
        },
        {"token_embd": "gpt_neox.embed_in", "output_norm": "gpt_neox.final_layer_norm", "output": "embed_out"},
        layers="gpt_neox.layers.",
        groups_heads=True,
    ),
    "bloom": Architecture(
        "BloomForCausalLM",
        "bloom",
        {**_TO_4H, **_SELF_ATTENTION, "ffn_norm": "post_attention_layernorm"},
        {**_WORD_ENDS, "token_embd_norm": "transformer.word_embeddings_layernorm"},
        layers="transformer.h.",
        groups_heads=True,
    ),
    "falcon": _FALCON,
    "gpt-oss": Architecture(
        "GptOssForCausalLM",
        "gpt_oss",
        {
            **_ATTENTION,
            "post_attention_norm": "post_attention_layernorm",
            "attn_sinks.weight": "self_attn.sinks",
            "ffn_gate_inp": "mlp.router",
            "ffn_gate_exps.weight": f"{_STACKS}gate_up_proj",
            "ffn_gate_exps.bias": f"{_STACKS}gate_up_proj_bias",
            "ffn_down_exps.weight": f"{_STACKS}down_proj",
            "ffn_down_exps.bias": f"{_STACKS}down_proj_bias",
        },
        _ENDS,
        partners={f"ffn_gate_exps.{kind}": f"ffn_up_exps.{kind}" for kind in ("weight", "bias")},
    ),
    "falcon-h1": replace(
        _LLAMA,
        class_name="FalconH1ForCausalLM",
        model_type="falcon_h1",
        layer={**_LLAMA.layer, **FALCON_H1},
        interleaves_heads=False,
    ),
    # Queries and keys are in the order of pairs, which attention without positions need not undo.
    "granitehybrid": replace(
        _LLAMA,
        class_name="GraniteMoeHybridForCausalLM",
        model_type="granitemoehybrid",
        layer={**_LLAMA.layer, **GRANITE},
        interleaves_heads=False,
    ),
    "qwen2vl": _QWEN_2,
    "qwen3vl": _QWEN_3,
    "qwen3vlmoe": _QWEN_3_MOE,
    "lfm2": _LFM2,
    "lfm2moe": replace(_LFM2, class_name="Lfm2MoeForCausalLM", model_type="lfm2_moe"),
    "mamba2": replace(_NEMOTRON, class_name="Mamba2ForCausalLM", model_type="mamba2"),
    "nemotron_h": _NEMOTRON,
    "nemotron_h_moe": _NEMOTRON,
    "qwen35": _QWEN_35,
    "qwen35moe": replace(_QWEN_35, class_name="Qwen3_5MoeForCausalLM", model_type="qwen3_5_moe_text"),
}
_FALCON_OF_TWO_NORMS = replace(_FALCON, layer={**_FALCON.layer, "attn_norm": "ln_mlp", "attn_norm_2": "ln_attn"})
_MIXTRAL = replace(
    _LLAMA,
    class_name="MixtralForCausalLM",
    model_type="mixtral",
    layer={
        **_ATTENTION,
        "ffn_gate_inp": "block_sparse_moe.gate",
        "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
        "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
        "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
    },
)
CLASS_NAMES = frozenset(entry.class_name for entry in (*ARCHITECTURES.values(), _MIXTRAL))
_LAYER = re.compile(r"blk\.(0|[1-9][0-9]{0,4})\.([a-z0-9_]+(?:\.[a-z0-9_]+)?)\.(weight|bias)")
_BARE = re.compile(r"blk\.(0|[1-9][0-9]{0,4})\.([a-z0-9_]+)()")  # without `.weight`
_EXPERTS = "_exps"
_MAX_EXPERTS = 4096


class Target(NamedTuple):
    """The target of a tensor of a file.

    Attributes:
        names: The name of each part in repositories.
        is_experts: Its parts are experts; otherwise it is one part.
        has_interleaved_heads: Its rows must be put into order for RoPE by halves.
        is_offset: 1 is subtracted, as repositories store it.
        is_transposed: Repositories store it the other way around.
        qkv_heads: Numbers of heads of queries, and of keys and values, by which its rows must be grouped.
        is_stack: Repositories have all experts in one tensor too.
        partner: Tensor of the file whose rows follow those of this one in turns.
        form: How repositories have it, where it is otherwise in the file: `flat` is one row of numbers, `log of
            negative` the logarithms of their negatives too, `taps` those of a convolution, [channels, 1, length], and
            `row` a matrix of one row.
    """

    names: tuple[str, ...]
    is_experts: bool = False
    has_interleaved_heads: bool = False
    is_offset: bool = False
    is_transposed: bool = False
    qkv_heads: tuple[int, int] | None = None
    is_stack: bool = False
    partner: str = ""
    form: str = ""


def architecture_of(header: Header) -> Architecture:
    """The architecture of a file, as repositories name it.

    Raises:
        GGUFError: It is not supported.
    """
    found = ARCHITECTURES.get(header.architecture)
    if found is None:
        raise GGUFError(
            f"the architecture {header.architecture[:64]!r} is not supported as GGUF; {', '.join(ARCHITECTURES)} are."
        )
    if found is _FALCON and "blk.0.attn_norm_2.weight" in header.tensors:
        return _FALCON_OF_TWO_NORMS
    return _MIXTRAL if found is _LLAMA and header.metadata.get("llama.expert_count") else found


def target_of(header: Header, name: str) -> Target:
    """The target of a tensor, by its name in the file; an unknown name is kept.

    Raises:
        GGUFError: Its shape is not that of experts, or what it belongs to is missing.
    """
    architecture, shape = architecture_of(header), header.tensors[name].shape
    layer = _LAYER.fullmatch(name) or _BARE.fullmatch(name)
    if layer is not None and (stack := _stack_of(header, architecture, layer)) is not None:
        return stack
    if layer is None or layer[2] not in architecture.layer:
        part, _, kind = name.rpartition(".")
        is_norm = part == "output_norm"
        named = f"{architecture.ends[part]}.{kind}" if part in architecture.ends else name
        return Target((named,), is_offset=is_norm and architecture.has_offset_norms)
    number, part, kind = layer.groups()
    named = f"{architecture.layers}{number}.{architecture.layer[part]}.{kind}"
    if part.endswith(_EXPERTS):
        if len(shape) != 3 or shape[0] > _MAX_EXPERTS:
            raise GGUFError(f"{name[:128]} has the shape {list(shape)[:4]}, which is not that of experts.")
        return Target(tuple(named.format(expert) for expert in range(shape[0])), is_experts=True)
    return Target(
        (named,),
        has_interleaved_heads=architecture.interleaves_heads and part in ("attn_q", "attn_k"),
        is_offset=architecture.has_offset_norms and part.endswith("_norm"),
        is_transposed=architecture.is_transposed and len(shape) == 2,
        qkv_heads=_heads_of(header, name) if architecture.groups_heads and part == "attn_qkv" else None,
        form=FORMS.get(f"{part}.{kind}", ""),
    )


def _stack_of(header: Header, architecture: Architecture, layer: re.Match[str]) -> Target | None:
    """The target of a tensor with a name of its own; None where there is none."""
    number, part, kind = layer.groups()
    key = f"{part}.{kind}" if kind else part
    if key in architecture.partners.values():
        return Target(())  # it comes with its partner
    if key not in architecture.layer or (key == part and kind):
        return None
    partner = f"blk.{number}.{architecture.partners[key]}" if key in architecture.partners else ""
    if partner and (partner not in header.tensors or _kind_of(header, partner) != _kind_of(header, layer[0])):
        raise GGUFError(f"{layer[0]} and {partner[:128]} are not of the same shape and type.")
    named = f"{architecture.layers}{number}.{architecture.layer[key]}"
    return Target((named,), is_stack=part.endswith(_EXPERTS), partner=partner, form=FORMS.get(key, ""))


def _kind_of(header: Header, name: str) -> tuple[tuple[int, ...], str]:
    info = header.tensors[name]
    return info.shape, info.type.name


def _heads_of(header: Header, name: str) -> tuple[int, int]:
    heads = header.metadata.get(f"{header.architecture}.attention.head_count")
    shared = header.metadata.get(f"{header.architecture}.attention.head_count_kv", heads)
    num_rows = header.tensors[name].shape[0]
    if type(heads) is not int or type(shared) is not int or shared < 1 or heads % shared:
        raise GGUFError(f"{heads} heads cannot share {shared} heads of keys and values.")
    if num_rows % (heads + 2 * shared):
        raise GGUFError(f"{name[:128]} has {num_rows} rows, which are not those of {heads} and {shared} heads.")
    return heads, shared
