"""Gemma 3n: names of tensors, and fields of its configuration."""

from __future__ import annotations

import math
from array import array
from dataclasses import replace
from statistics import NormalDist
from typing import Any

from llmstack_gguf.gemma4 import GEMMA_4
from llmstack_gguf.header import GGUFError, Header
from llmstack_gguf.layer_names import AROUND, ATTENTION, GATED, HEAD_NORMS
from llmstack_gguf.variants import Values

GEMMA_3N = replace(
    GEMMA_4,
    class_name="Gemma3nForCausalLM",
    model_type="gemma3n_text",
    layer={
        **ATTENTION,
        **HEAD_NORMS,
        **GATED,
        **AROUND,
        "inp_gate": "per_layer_input_gate",
        "proj": "per_layer_projection",
        "post_norm": "post_per_layer_input_norm",
        "altup_correct_coef": "altup.correction_coefs",
        "altup_correct_scale.weight": "altup.correct_output_scale",
        "altup_predict_coef": "altup.prediction_coefs",
        "altup_router": "altup.modality_router",
        "altup_router_norm": "altup.router_norm",
        "laurel_l": "laurel.linear_left",
        "laurel_r": "laurel.linear_right",
        "laurel_post_norm": "laurel.post_laurel_norm",
    },
    ends={
        **GEMMA_4.ends,
        "altup_proj": "model.altup_projections.{}",
        "altup_unembd_proj": "model.altup_unembed_projections.{}",
    },
)


def gemma_3n_fields(header: Header, values: Values) -> dict[str, Any]:
    """The fields of Gemma 3n."""
    num_layers, tensors = values.num_layers(), header.tensors
    have_windows = values.integers("attention.sliding_window_pattern", num_layers)
    table, narrow = tensors.get("per_layer_token_embd.weight"), tensors.get("blk.0.laurel_l.weight")
    if table is None or narrow is None:
        raise GGUFError("it has no vectors of tokens for each layer, or no second residual.")
    return {
        "hidden_size": values.integer("embedding_length"),
        "num_hidden_layers": num_layers,
        "num_attention_heads": values.integer("attention.head_count"),
        "num_key_value_heads": values.integer("attention.head_count_kv"),
        "head_dim": values.integer("attention.key_length"),
        "intermediate_size": values.integers("feed_forward_length", num_layers),
        "max_position_embeddings": values.integer("context_length"),
        "rms_norm_eps": values.number("attention.layer_norm_rms_epsilon"),
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": [("sliding" if one else "full") + "_attention" for one in have_windows],
        "sliding_window": values.integer("attention.sliding_window"),
        "rope_theta": values.number("rope.freq_base", 1e6),
        "rope_local_base_freq": values.number("rope.freq_base_swa", 10_000.0),
        "final_logit_softcapping": values.number("final_logit_softcapping", 30.0) or None,
        "num_kv_shared_layers": values.integer("attention.shared_kv_layers"),
        "hidden_size_per_layer_input": values.integer("embedding_length_per_layer_input"),
        "vocab_size_per_layer_input": table.shape[0],
        "altup_active_idx": values.integer("altup.active_idx"),
        "altup_num_inputs": values.integer("altup.num_inputs"),
        "laurel_rank": narrow.shape[0],
        "activation_sparsity_pattern": _shares(header, num_layers),
    }


def _shares(header: Header, num_layers: int) -> list[float]:
    """The share of each layer's numbers that become 0, from the deviations that they must exceed."""
    found = header.metadata.get(f"{header.architecture}.activation_sparsity_scale")
    if not isinstance(found, array) or len(found) != num_layers or any(math.isnan(one) for one in found):
        raise GGUFError(f"its scales of sparsity are no numbers of each of {num_layers} layers.")
    return [NormalDist().cdf(one) if math.isfinite(one) else float(one > 0) for one in found]
