"""Architectures of GGUF files: configuration and names of tensors."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmstack_gguf.header import GGUFError, Header, Value
from llmstack_gguf.tokenizer import special_id


@dataclass(frozen=True, slots=True)
class Architecture:
    """What differs between the architectures.

    Attributes:
        class_name: Entry of `architectures` in `config.json`.
        model_type: The same of `model_type`.
        interleaves_heads: Whether rows of queries and keys are stored in the order of pairs that are rotated together.
    """

    class_name: str
    model_type: str
    interleaves_heads: bool = False


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("LlamaForCausalLM", "llama", interleaves_heads=True),
    "qwen2": Architecture("Qwen2ForCausalLM", "qwen2"),
    "qwen3": Architecture("Qwen3ForCausalLM", "qwen3"),
}

_NAMES: Mapping[str, str] = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES: Mapping[str, str] = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER = re.compile(r"blk\.(0|[1-9][0-9]{0,4})\.([a-z_]+)\.(weight|bias)")
ROPE_FACTORS = "rope_freqs.weight"
"""Divisors of the frequencies of Llama 3.1 and newer; they belong to the configuration."""

# Published settings of Llama 3.1 and newer: factor and the positions of before. A file holds the divisors alone.
_LLAMA_3_SETTINGS = ((8.0, 8192), (32.0, 8192))
_FACTOR_TOLERANCE = 1e-3


def tensor_name(name: str) -> str:
    """The tensor's name in a repository of Hugging Face; the given one where there is none."""
    layer = _LAYER.fullmatch(name)
    if layer is not None and layer[2] in _LAYER_NAMES:
        return f"model.layers.{layer[1]}.{_LAYER_NAMES[layer[2]]}.{layer[3]}"
    part, _, kind = name.rpartition(".")
    return f"{_NAMES[part]}.{kind}" if part in _NAMES else name


def has_interleaved_heads(header: Header, name: str) -> bool:
    """Whether rows of a tensor, by its name in the file, must be put into order for RoPE by halves."""
    layer = _LAYER.fullmatch(name)
    return layer is not None and layer[2] in ("attn_q", "attn_k") and _architecture(header).interleaves_heads


def model_config(header: Header, rope_factors: Sequence[float] | None = None) -> dict[str, Any]:
    """The contents of `config.json`.

    `rope_factors`: The numbers of the tensor `ROPE_FACTORS`, where the file has it.

    Raises:
        GGUFError: The architecture or a variant of it is not supported, or a value is missing.
    """
    architecture = _architecture(header)
    values = _Values(header.metadata, header.architecture)
    if values.integer("expert_count", 0):
        raise GGUFError("mixtures of experts are not supported.")
    hidden_size, num_heads = values.integer("embedding_length"), values.integer("attention.head_count")
    head_dim = values.integer("attention.key_length", hidden_size // num_heads if num_heads else 0)
    if values.integer("attention.value_length", head_dim) != head_dim:
        raise GGUFError("keys and values of different lengths are not supported.")
    if values.integer("rope.dimension_count", head_dim) != head_dim:
        raise GGUFError("rotation of a part of each head is not supported.")
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise GGUFError("it has no token embeddings.")
    num_positions, theta = values.integer("context_length"), values.number("rope.freq_base", 10_000.0)
    config: dict[str, Any] = {
        "architectures": [architecture.class_name],
        "model_type": architecture.model_type,
        "hidden_size": hidden_size,
        "num_attention_heads": num_heads,
        "num_key_value_heads": values.integer("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "num_hidden_layers": values.integer("block_count"),
        "intermediate_size": values.integer("feed_forward_length"),
        "rms_norm_eps": values.number("attention.layer_norm_rms_epsilon"),
        "vocab_size": embedding.shape[0],
        "max_position_embeddings": num_positions,
        "rope_theta": theta,
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_output.bias" in header.tensors,
        "tie_word_embeddings": False,  # a shared table is read twice, so that the head keeps its few bits
        "dtype": _dtype(header),
        "quantization_config": {"quant_method": "gguf"},
    }
    scaling = _rope_scaling(values, rope_factors, theta, head_dim)
    if scaling is not None:
        config["rope_scaling"] = scaling
    for name in ("bos", "eos"):
        if (token_id := special_id(header.metadata, name)) is not None:
            config[f"{name}_token_id"] = token_id
    return config


def generation_config(header: Header) -> dict[str, Any]:
    """The contents of `generation_config.json`: the tokens that end an answer."""
    ids = [special_id(header.metadata, name) for name in ("eos", "eot", "eom")]
    found = list(dict.fromkeys(token_id for token_id in ids if token_id is not None))
    return {"eos_token_id": found} if found else {}


def _architecture(header: Header) -> Architecture:
    found = ARCHITECTURES.get(header.architecture)
    if found is None:
        raise GGUFError(
            f"the architecture {header.architecture[:64]!r} is not supported as GGUF; {', '.join(ARCHITECTURES)} are."
        )
    return found


def _dtype(header: Header) -> str:
    """What the model computes in: the type of the matrices where they have one, else bfloat16."""
    kinds = {info.type.name for info in header.tensors.values() if len(info.shape) > 1}
    if kinds == {"F32"}:
        return "float32"
    return "float16" if kinds <= {"F32", "F16"} else "bfloat16"


def _rope_scaling(
    values: _Values, factors: Sequence[float] | None, theta: float, head_dim: int
) -> dict[str, Any] | None:
    if factors is not None:
        return _llama_3_scaling(factors, theta, head_dim)
    kind = values.text("rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise GGUFError(f"the scaling {kind[:64]!r} of RoPE is not supported.")
    scaling: dict[str, Any] = {"rope_type": kind, "factor": values.number("rope.scaling.factor")}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = values.integer("rope.scaling.original_context_length")
    return scaling


def _llama_3_scaling(found: Sequence[float], theta: float, head_dim: int) -> dict[str, Any]:
    for factor, num_positions in _LLAMA_3_SETTINGS:
        expected = llama_3_factors(factor, num_positions, theta, head_dim)
        if len(found) == len(expected) and all(
            math.isclose(one, other, rel_tol=_FACTOR_TOLERANCE) for one, other in zip(found, expected, strict=True)
        ):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": num_positions,
            }
    raise GGUFError("its factors of RoPE are not those of Llama 3.1 or 3.2.")


def llama_3_factors(factor: float, num_positions: int, theta: float, head_dim: int) -> list[float]:
    """What each frequency is divided by: 1 for short waves, `factor` for long ones, and between them smoothly."""
    factors = []
    for index in range(head_dim // 2):
        length = 2 * math.pi * theta ** (2 * index / head_dim)
        if length < num_positions / 4:
            factors.append(1.0)
        elif length > num_positions:
            factors.append(factor)
        else:
            share = (num_positions / length - 1) / 3
            factors.append(1 / ((1 - share) / factor + share))
    return factors


class _Values:
    """Values of the architecture's own keys."""

    def __init__(self, metadata: Mapping[str, Value], architecture: str) -> None:
        self._metadata = metadata
        self._prefix = architecture

    def integer(self, name: str, default: int | None = None) -> int:
        found = self._metadata.get(f"{self._prefix}.{name}", default)
        if type(found) is not int or found < 0:
            raise GGUFError(f"{self._prefix}.{name} is missing or no count.")
        return found

    def number(self, name: str, default: float | None = None) -> float:
        found = self._metadata.get(f"{self._prefix}.{name}", default)
        if not isinstance(found, int | float) or not math.isfinite(found):
            raise GGUFError(f"{self._prefix}.{name} is missing or no number.")
        return float(found)

    def text(self, name: str, default: str) -> str:
        found = self._metadata.get(f"{self._prefix}.{name}", default)
        return found if isinstance(found, str) else default
