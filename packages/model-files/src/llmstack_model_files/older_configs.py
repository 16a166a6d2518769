"""Configurations of models from before transformers had their class.

They came with code of their own. Their fields get the names that transformers gives them. What its class does not
compute is refused, since the weights alone would not show it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Of `nomic-ai/nomic-embed-text-v1` and v1.5, whose code took the names of GPT-2.
_NOMIC_NAMES: Mapping[str, str] = {
    "layer_norm_epsilon": "layer_norm_eps",
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "n_layer": "num_hidden_layers",
}
_NOMIC_FIXED: Mapping[str, tuple[Any, ...]] = {
    "activation_function": ("swiglu",),
    "causal": (False,),
    "mlp_fc1_bias": (False,),
    "mlp_fc2_bias": (False,),
    "moe_every_n_layers": (0, None),
    "parallel_block": (False,),
    "prenorm": (False,),
    "qkv_proj_bias": (False,),
    "rotary_emb_fraction": (1, 1.0),
    "rotary_emb_interleaved": (False,),
    "rotary_emb_scale_base": (None,),
    "use_rms_norm": (False, None),
}


# Names that vLLM's commands give a class whose further layers are found in `modules.json` here.
_SAME_CLASS: Mapping[str, str] = {"ColBERTModernBertModel": "ModernBertModel"}


def named(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration with the class that computes it."""
    given = config.get("architectures")
    if not isinstance(given, list):
        return config
    return {**config, "architectures": [_SAME_CLASS.get(str(name), name) for name in given]}


def renewed(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The configuration under the names of transformers; others are as they were.

    Raises:
        ValueError: A field has a value that the class of transformers does not compute.
    """
    if config.get("model_type") != "nomic_bert" or "n_embd" not in config:
        return config
    for name, allowed in _NOMIC_FIXED.items():
        if name in config and config[name] not in allowed:
            raise ValueError(f"config.json: {name} {config[name]!r} is not supported for nomic_bert.")
    named = {new: config[old] for old, new in _NOMIC_NAMES.items() if old in config}
    # Beyond the positions that it was trained with, its own code turned each prompt by the longest of the batch.
    trained = config.get("max_trained_positions") or 2048
    positions = min(trained, config.get("n_positions") or trained)
    rope = {"rope_type": "default", "rope_theta": float(config.get("rotary_emb_base") or 10_000)}
    kept = {name: value for name, value in config.items() if name not in {*_NOMIC_NAMES, "n_positions"}}
    return {**kept, **named, "hidden_act": "silu", "max_position_embeddings": positions, "rope_parameters": rope}
