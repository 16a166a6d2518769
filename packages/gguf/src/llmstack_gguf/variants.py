"""Fields of `config.json` in which the architectures of GGUF files differ."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llmstack_gguf.header import GGUFError, Header, Value

PARTLY_ROTATED = frozenset({"phi2", "phi3", "stablelm", "glm4", "glm4moe", "minimax-m2"})
"""Architectures that may rotate a part of each head."""
MAX_LAYERS = 4096
"""So many are looked for, and have counts of their own."""
SHORT_FACTORS, LONG_FACTORS = "rope_factors_short.weight", "rope_factors_long.weight"
_YARN_KEYS: Mapping[str, str] = {
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
    "yarn_attn_factor": "attention_factor",
}
# Layers of the models whose scores have a factor of their own, which files do not say.
_LARGE_GEMMA: Mapping[str, int] = {"gemma2": 46, "gemma3": 62}


class Values:
    """Values of the architecture's own keys."""

    def __init__(self, metadata: Mapping[str, Value], architecture: str) -> None:
        self._metadata = metadata
        self.prefix = architecture

    def has(self, name: str) -> bool:
        """Whether the file has a value of this name."""
        return f"{self.prefix}.{name}" in self._metadata

    def integer(self, name: str, default: int | None = None) -> int:
        found = self._metadata.get(f"{self.prefix}.{name}", default)
        if type(found) is not int or found < 0:
            raise GGUFError(f"{self.prefix}.{name} is missing or no count.")
        return found

    def num_layers(self) -> int:
        """Layers of the model itself, without those that predict several tokens, at most `MAX_LAYERS`."""
        count = self.integer("block_count") - self.integer("nextn_predict_layers", 0)
        if not 0 < count <= MAX_LAYERS:
            raise GGUFError(f"its metadata says {count} layers; {MAX_LAYERS} are the most.")
        return count

    def integers(self, name: str, count: int) -> list[int]:
        """A count of each layer, where the file has one for all or a list of them."""
        found = self._metadata.get(f"{self.prefix}.{name}")
        if not isinstance(found, array):
            return [self.integer(name)] * count
        if len(found) == self.integer("block_count"):  # with layers that predict several tokens
            found = found[:count]
        counts = [one for one in found if type(one) is int and one >= 0]
        if not len(found) == len(counts) == count:
            raise GGUFError(f"{self.prefix}.{name} has no count for each of {count} layers.")
        return counts

    def number(self, name: str, default: float | None = None) -> float:
        found = self._metadata.get(f"{self.prefix}.{name}", default)
        if not isinstance(found, int | float) or not math.isfinite(found):
            raise GGUFError(f"{self.prefix}.{name} is missing or no number.")
        return float(found)

    def text(self, name: str, default: str) -> str:
        found = self._metadata.get(f"{self.prefix}.{name}", default)
        return found if isinstance(found, str) else default

    def flag(self, name: str, *, default: bool) -> bool:
        """A value that is true or false."""
        return self._metadata.get(f"{self.prefix}.{name}", default) is True


def rope_scaling_of(values: Values) -> dict[str, Any] | None:
    """`rope_scaling` of linear scaling and of YaRN; None without scaling.

    Raises:
        GGUFError: Another kind, or a number is missing.
    """
    kind = values.text("rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise GGUFError(f"the scaling {kind[:64]!r} of RoPE is not supported.")
    scaling: dict[str, Any] = {"rope_type": kind, "factor": values.number("rope.scaling.factor")}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = values.integer("rope.scaling.original_context_length")
        for key, name in _YARN_KEYS.items():
            if values.has(f"rope.scaling.{key}"):
                scaling[name] = values.number(f"rope.scaling.{key}")
        if values.number("rope.scaling.yarn_ext_factor", 1.0) != 1.0:
            raise GGUFError("an extrapolation factor of YaRN is not supported.")
    return scaling


def share_of(rotary_dim: int, head_dim: int) -> float:
    """The part of each head that is rotated, so that its product with `head_dim` is no less than `rotary_dim`."""
    share = rotary_dim / head_dim if head_dim else 0.0
    return share if share * head_dim >= rotary_dim else math.nextafter(share, 2.0)


def gpt2_fields(header: Header, values: Values) -> dict[str, Any]:
    """The fields of GPT-2, whose names are its own."""
    return {
        "n_embd": values.integer("embedding_length"),
        "n_head": values.integer("attention.head_count"),
        "n_layer": values.integer("block_count"),
        "n_positions": values.integer("context_length"),
        "n_inner": values.integer("feed_forward_length"),
        "layer_norm_epsilon": values.number("attention.layer_norm_epsilon"),
        "activation_function": "gelu_new",
    }


def gpt_neox_fields(header: Header, values: Values) -> dict[str, Any]:
    """The fields of GPT-NeoX. Files do not say the activation, which all but the first of its models have in common."""
    hidden_size, num_heads = values.integer("embedding_length"), values.integer("attention.head_count")
    head_dim = hidden_size // num_heads if num_heads else 0
    share = share_of(values.integer("rope.dimension_count", head_dim), head_dim)
    theta = values.number("rope.freq_base", 10_000.0)
    return {
        "hidden_size": hidden_size,
        "num_attention_heads": num_heads,
        "num_hidden_layers": values.integer("block_count"),
        "intermediate_size": values.integer("feed_forward_length"),
        "max_position_embeddings": values.integer("context_length"),
        "rotary_pct": share,
        "partial_rotary_factor": share,
        "rotary_emb_base": theta,
        "rope_theta": theta,
        "layer_norm_eps": values.number("attention.layer_norm_epsilon"),
        "use_parallel_residual": values.flag("use_parallel_residual", default=True),
        "attention_bias": "blk.0.attn_qkv.bias" in header.tensors,
        "hidden_act": "gelu",
    }


def bloom_fields(header: Header, values: Values) -> dict[str, Any]:
    """The fields of BLOOM."""
    hidden_size = values.integer("embedding_length")
    if values.integer("feed_forward_length") != 4 * hidden_size:
        raise GGUFError("a feed-forward layer that is not four times as wide is not supported for this architecture.")
    return {
        "hidden_size": hidden_size,
        "n_head": values.integer("attention.head_count"),
        "n_layer": values.integer("block_count"),
        "seq_length": values.integer("context_length"),
        "layer_norm_epsilon": values.number("attention.layer_norm_epsilon"),
    }


def falcon_fields(header: Header, values: Values) -> dict[str, Any]:
    """The fields of Falcon with RoPE, of both generations; files of those with ALiBi do not exist."""
    num_kv_heads = values.integer("attention.head_count_kv", 1)
    has_two_norms = "blk.0.attn_norm_2.weight" in header.tensors
    return {
        "hidden_size": values.integer("embedding_length"),
        "num_attention_heads": values.integer("attention.head_count"),
        "num_kv_heads": num_kv_heads,
        "num_hidden_layers": values.integer("block_count"),
        "ffn_hidden_size": values.integer("feed_forward_length"),
        "max_position_embeddings": values.integer("context_length"),
        "rope_theta": values.number("rope.freq_base", 10_000.0),
        "layer_norm_epsilon": values.number("attention.layer_norm_epsilon"),
        "new_decoder_architecture": num_kv_heads > 1 or has_two_norms,
        "num_ln_in_parallel_attn": 2 if has_two_norms else 1,
        "multi_query": True,
        "parallel_attn": True,
        "alibi": False,
        "bias": "blk.0.attn_qkv.bias" in header.tensors,
    }


def variant_fields(
    header: Header, values: Values, common: Mapping[str, Any], rope_factors: Mapping[str, Sequence[float]]
) -> dict[str, Any]:
    """The fields of an architecture beside, or instead of, the common ones.

    Raises:
        GGUFError: A variant is not supported, or a value is missing.
    """
    if header.architecture == "phi3":
        return _phi3(values, common, rope_factors)
    return _FIELDS.get(header.architecture, _with_experts)(header, values, common)


_Fields = Callable[[Header, Values, Mapping[str, Any]], dict[str, Any]]


def _with_experts(header: Header, values: Values, common: Mapping[str, Any]) -> dict[str, Any]:
    """Llama and Qwen, with experts and without."""
    fields: dict[str, Any] = {"rms_norm_eps": values.number("attention.layer_norm_rms_epsilon")}
    num_experts = values.integer("expert_count", 0)
    if not num_experts:
        return fields
    if "blk.0.ffn_gate_exps.weight" not in header.tensors:
        raise GGUFError("it has a tensor for each expert, as old files do; convert the model again.")
    fields["num_experts_per_tok"] = values.integer("expert_used_count")
    if header.architecture == "llama":
        return fields | {"num_local_experts": num_experts}
    if header.architecture not in ("qwen3moe", "qwen3vlmoe"):
        raise GGUFError("mixtures of experts of this architecture are not supported.")
    inner_size = values.integer("expert_feed_forward_length")
    return fields | {"num_experts": num_experts, "moe_intermediate_size": inner_size, "norm_topk_prob": True}


def _gemma(header: Header, values: Values, common: Mapping[str, Any]) -> dict[str, Any]:
    tanh = "gelu_pytorch_tanh"
    fields: dict[str, Any] = {
        "rms_norm_eps": values.number("attention.layer_norm_rms_epsilon"),
        "hidden_act": tanh,
        "hidden_activation": tanh,
    }
    if header.architecture == "gemma":
        return fields
    is_large = common["num_hidden_layers"] == _LARGE_GEMMA[header.architecture]
    num_heads, hidden_size = common["num_attention_heads"], common["hidden_size"]
    fields["query_pre_attn_scalar"] = hidden_size // num_heads if is_large else common["head_dim"]
    fields["sliding_window"] = values.integer("attention.sliding_window")
    if header.architecture == "gemma2":
        caps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
        return fields | {name: values.number(name, default) for name, default in caps.items()}
    return fields | {"rope_theta": values.number("rope.freq_base", 1e6), "rope_local_base_freq": 10_000.0}


def _phi2(header: Header, values: Values, common: Mapping[str, Any]) -> dict[str, Any]:
    if "blk.0.attn_q.weight" not in header.tensors:
        raise GGUFError("queries, keys and values in one tensor are not supported for this architecture.")
    return {"layer_norm_eps": values.number("attention.layer_norm_epsilon"), "hidden_act": "gelu_new"}


def _stablelm(header: Header, values: Values, common: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "layer_norm_eps": values.number("attention.layer_norm_epsilon"),
        "use_parallel_residual": values.flag("use_parallel_residual", default=False),
        "use_qkv_bias": "blk.0.attn_q.bias" in header.tensors,
        "qk_layernorm": "blk.0.attn_q_norm.weight" in header.tensors,
    }


def _phi3(values: Values, common: Mapping[str, Any], rope_factors: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    window = values.integer("attention.sliding_window", 0)
    fields: dict[str, Any] = {
        "rms_norm_eps": values.number("attention.layer_norm_rms_epsilon"),
        "sliding_window": window if 0 < window < common["max_position_embeddings"] else None,
    }
    if LONG_FACTORS in rope_factors:
        original = values.integer("rope.scaling.original_context_length")
        fields["original_max_position_embeddings"] = original
        fields["rope_scaling"] = {
            "rope_type": "longrope",
            "short_factor": [*rope_factors.get(SHORT_FACTORS, ())],
            "long_factor": [*rope_factors[LONG_FACTORS]],
            "original_max_position_embeddings": original,
        }
    return fields


def _gpt_oss(header: Header, values: Values, common: Mapping[str, Any]) -> dict[str, Any]:
    scaling: dict[str, Any] = dict(common.get("rope_scaling") or {"rope_type": "default"})
    if scaling["rope_type"] == "yarn":
        scaling |= {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}  # which files do not say
    return {
        "rms_norm_eps": values.number("attention.layer_norm_rms_epsilon"),
        "sliding_window": values.integer("attention.sliding_window"),
        "intermediate_size": values.integer("expert_feed_forward_length"),
        "num_local_experts": values.integer("expert_count"),
        "num_experts_per_tok": values.integer("expert_used_count"),
        "rope_scaling": scaling,
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
    }


OWN_FIELDS: Mapping[str, Callable[[Header, Values], dict[str, Any]]] = {
    "gpt2": gpt2_fields,
    "gptneox": gpt_neox_fields,
    "bloom": bloom_fields,
    "falcon": falcon_fields,
}
"""Architectures whose fields have names of their own."""
_FIELDS: Mapping[str, _Fields] = {
    "gpt-oss": _gpt_oss,
    "gemma": _gemma,
    "gemma2": _gemma,
    "gemma3": _gemma,
    "phi2": _phi2,
    "stablelm": _stablelm,
}
