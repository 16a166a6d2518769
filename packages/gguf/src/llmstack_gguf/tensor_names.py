"""Names of tensors of the architectures that have no module of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from llmstack_gguf.hybrids import FALCON_H1, GRANITE, LFM2, NEMOTRON, QWEN_3_NEXT, QWEN_35
from llmstack_gguf.layer_names import AROUND, ATTENTION, ENDS, EXPERTS, GATED, HEAD_NORMS, LLAMA, Architecture

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
_QWEN_3 = replace(
    LLAMA,
    class_name="Qwen3ForCausalLM",
    model_type="qwen3",
    layer={**ATTENTION, **HEAD_NORMS, **GATED},
    interleaves_heads=False,
)
_QWEN_2 = replace(LLAMA, class_name="Qwen2ForCausalLM", model_type="qwen2", interleaves_heads=False)
_QWEN_3_MOE = replace(
    _QWEN_3,
    class_name="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    layer={**ATTENTION, **HEAD_NORMS, **EXPERTS},
)
_GEMMA = replace(
    LLAMA, class_name="GemmaForCausalLM", model_type="gemma", interleaves_heads=False, has_offset_norms=True
)
_GEMMA_2 = replace(_GEMMA, class_name="Gemma2ForCausalLM", model_type="gemma2", layer={**ATTENTION, **GATED, **AROUND})
_FALCON = Architecture(
    "FalconForCausalLM",
    "falcon",
    {**_TO_4H, **_SELF_ATTENTION},
    _WORD_ENDS,
    layers="transformer.h.",
    groups_heads=True,
)
_NEMOTRON = replace(
    LLAMA, class_name="NemotronHForCausalLM", model_type="nemotron_h", layer=NEMOTRON, interleaves_heads=False
)
_LFM2 = replace(
    LLAMA,
    class_name="Lfm2ForCausalLM",
    model_type="lfm2",
    layer=LFM2,
    ends={**ENDS, "token_embd_norm": "model.embedding_norm", "output_norm": "model.embedding_norm"},
    interleaves_heads=False,
)
_QWEN_35 = replace(
    _QWEN_3,
    class_name="Qwen3_5ForCausalLM",
    model_type="qwen3_5_text",
    layer={**_QWEN_3.layer, **QWEN_35},
    has_offset_norms=True,
)
DECODERS: Mapping[str, Architecture] = {
    "llama": LLAMA,
    "qwen2": _QWEN_2,
    "qwen3": _QWEN_3,
    "qwen3moe": _QWEN_3_MOE,
    "gemma": _GEMMA,
    "gemma2": _GEMMA_2,
    "gemma3": replace(
        _GEMMA_2,
        class_name="Gemma3ForCausalLM",
        model_type="gemma3_text",
        layer={**ATTENTION, **HEAD_NORMS, **GATED, **AROUND},
    ),
    "phi2": Architecture(
        "PhiForCausalLM",
        "phi",
        {**ATTENTION, "attn_output": "self_attn.dense", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"},
        {**ENDS, "output_norm": "model.final_layernorm"},
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
        ENDS,
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
    "stablelm": Architecture("StableLmForCausalLM", "stablelm", {**ATTENTION, **GATED}, ENDS),
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
            **ATTENTION,
            "post_attention_norm": "post_attention_layernorm",
            "attn_sinks.weight": "self_attn.sinks",
            "ffn_gate_inp": "mlp.router",
            "ffn_gate_exps.weight": f"{_STACKS}gate_up_proj",
            "ffn_gate_exps.bias": f"{_STACKS}gate_up_proj_bias",
            "ffn_down_exps.weight": f"{_STACKS}down_proj",
            "ffn_down_exps.bias": f"{_STACKS}down_proj_bias",
        },
        ENDS,
        partners={f"ffn_gate_exps.{kind}": f"ffn_up_exps.{kind}" for kind in ("weight", "bias")},
    ),
    "falcon-h1": replace(
        LLAMA,
        class_name="FalconH1ForCausalLM",
        model_type="falcon_h1",
        layer={**LLAMA.layer, **FALCON_H1},
        interleaves_heads=False,
    ),
    # Queries and keys are in the order of pairs, which attention without positions need not undo.
    "granitehybrid": replace(
        LLAMA,
        class_name="GraniteMoeHybridForCausalLM",
        model_type="granitemoehybrid",
        layer={**LLAMA.layer, **GRANITE},
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
    "qwen3next": replace(
        _QWEN_35,
        class_name="Qwen3NextForCausalLM",
        model_type="qwen3_next",
        layer={**_QWEN_35.layer, **QWEN_3_NEXT},
    ),
    "qwen35": _QWEN_35,
    "qwen35moe": replace(_QWEN_35, class_name="Qwen3_5MoeForCausalLM", model_type="qwen3_5_moe_text"),
}
FALCON_OF_TWO_NORMS = replace(_FALCON, layer={**_FALCON.layer, "attn_norm": "ln_mlp", "attn_norm_2": "ln_attn"})
MIXTRAL = replace(
    LLAMA,
    class_name="MixtralForCausalLM",
    model_type="mixtral",
    layer={
        **ATTENTION,
        "ffn_gate_inp": "block_sparse_moe.gate",
        "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
        "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
        "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
    },
)
