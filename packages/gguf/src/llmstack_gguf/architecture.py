"""Configuration of the model in a GGUF file."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from llmstack_gguf.dense import DENSE_FIELDS
from llmstack_gguf.gemma3n import gemma_3n_fields
from llmstack_gguf.gemma4 import gemma_4_fields
from llmstack_gguf.header import GGUFError, Header
from llmstack_gguf.hybrids import HYBRID_FIELDS
from llmstack_gguf.latent import LATENT_FIELDS
from llmstack_gguf.mixtures import MIXTURE_FIELDS
from llmstack_gguf.names import architecture_of
from llmstack_gguf.selective import SELECTIVE_FIELDS
from llmstack_gguf.tokenizer import end_ids, special_id
from llmstack_gguf.variants import (
    LONG_FACTORS,
    OWN_FIELDS,
    PARTLY_ROTATED,
    SHORT_FACTORS,
    Values,
    rope_scaling_of,
    share_of,
    variant_fields,
)

ROPE_FACTORS = "rope_freqs.weight"
"""Divisors of the frequencies of Llama 3.1 and newer, and of Gemma 4; they belong to the configuration."""
ROPE_TENSORS = (ROPE_FACTORS, SHORT_FACTORS, LONG_FACTORS)
"""Tensors that belong to the configuration."""

# Published settings of Llama 3.1 and newer: factor and the positions of before. A file holds the divisors alone.
_LLAMA_3_SETTINGS = ((8.0, 8192), (32.0, 8192))
_FACTOR_TOLERANCE = 1e-3
# Names of sampling defaults in a file, as llama.cpp writes and reads them, and in `generation_config.json`.
_SAMPLING_KEYS = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
# So many layers are built in no time, and then miss their weights.
_MAX_UNCHECKED_LAYERS = 256
_ALL_FIELDS = {**OWN_FIELDS, **HYBRID_FIELDS, **LATENT_FIELDS, **SELECTIVE_FIELDS, "gemma3n": gemma_3n_fields}
_FURTHER_FIELDS = {**DENSE_FIELDS, **MIXTURE_FIELDS}  # beside those of the Llama family
_OLD_ROPE = ("rope_theta", "rope_scaling")
_THREE_AXES = ("qwen2vl", "qwen3vl", "qwen3vlmoe")


def model_config(header: Header, rope_factors: Mapping[str, Sequence[float]] | None = None) -> dict[str, Any]:
    """The contents of `config.json`.

    `rope_factors`: The numbers of those tensors of `ROPE_TENSORS` that the file has.

    Raises:
        GGUFError: The architecture or a variant of it is not supported, or a value is missing.
    """
    architecture = architecture_of(header)
    values = Values(header.metadata, header.architecture)
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise GGUFError("it has no token embeddings.")
    config: dict[str, Any] = {
        "architectures": [architecture.class_name],
        "model_type": architecture.model_type,
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": False,  # a shared table is read twice, so that the head keeps its few bits
        "dtype": _dtype(header),
        "quantization_config": {"quant_method": "gguf"},
    }
    if header.architecture == "gemma4":
        config |= gemma_4_fields(header, values, (rope_factors or {}).get(ROPE_FACTORS))
    elif (fields := _ALL_FIELDS.get(header.architecture)) is not None:
        config |= fields(header, values)
    else:
        config |= _llama_fields(header, values, rope_factors or {})
    num_layers, num_tensors = values.integer("block_count"), len(header.tensors)
    if num_layers > max(num_tensors, _MAX_UNCHECKED_LAYERS):
        raise GGUFError(f"its metadata says {num_layers} layers, and it has only {num_tensors} tensors.")
    for name in ("bos", "eos", "pad"):
        token_id = special_id(header.metadata, name)
        if token_id is not None or name == "pad":  # defaults of transformers may be beyond small vocabularies
            config[f"{name}_token_id"] = token_id
    return config


def _llama_fields(header: Header, values: Values, rope_factors: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    hidden_size, num_heads = values.integer("embedding_length"), values.integer("attention.head_count")
    head_dim = values.integer("attention.key_length", hidden_size // num_heads if num_heads else 0)
    if values.integer("attention.value_length", head_dim) != head_dim:
        raise GGUFError("keys and values of different lengths are not supported.")
    theta = values.number("rope.freq_base", 10_000.0)
    fields: dict[str, Any] = {
        "hidden_size": hidden_size,
        "num_attention_heads": num_heads,
        "num_key_value_heads": values.integer("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "num_hidden_layers": values.num_layers(),
        "intermediate_size": values.integer("feed_forward_length"),
        "max_position_embeddings": values.integer("context_length"),
        "rope_theta": theta,
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_output.bias" in header.tensors,
    }
    rotary_dim = values.integer("rope.dimension_count", head_dim)
    if header.architecture in PARTLY_ROTATED:
        fields["partial_rotary_factor"] = share_of(rotary_dim, head_dim)
    elif rotary_dim != head_dim:
        raise GGUFError("rotation of a part of each head is not supported.")
    scaling = _rope_scaling(values, rope_factors.get(ROPE_FACTORS), theta, head_dim)
    if (sections := _sections(header)) is not None and scaling is None:
        scaling = sections
    if scaling is not None:
        fields["rope_scaling"] = scaling
    if (own := _FURTHER_FIELDS.get(header.architecture)) is not None:
        fields |= own(header, values, fields)
        # Where layers have rotations of two kinds, the older fields would replace both.
        return fields if "rope_parameters" not in fields else {k: v for k, v in fields.items() if k not in _OLD_ROPE}
    return fields | variant_fields(header, values, fields, rope_factors)


def _sections(header: Header) -> dict[str, Any] | None:
    """The parts of Qwen-VL's rotary embedding for times, rows and columns of pictures; for text all axes are equal."""
    found = header.metadata.get(f"{header.architecture}.rope.dimension_sections")
    if header.architecture not in _THREE_AXES or not isinstance(found, array):
        return None
    sections = [one for one in found[:4] if type(one) is int]
    is_counted = 3 <= len(sections) == min(len(found), 4)
    if not is_counted or any(one < 1 for one in sections[:3]) or any(sections[3:]):
        raise GGUFError(f"{header.architecture}.rope.dimension_sections has no three axes.")
    is_interleaved = {"mrope_interleaved": True} if header.architecture != "qwen2vl" else {}
    return {"rope_type": "default", "mrope_section": sections[:3], **is_interleaved}


def generation_config(header: Header) -> dict[str, Any]:
    """The contents of `generation_config.json`: the tokens that end an answer, and sampling defaults."""
    ids = end_ids(header.metadata)
    contents: dict[str, Any] = {"eos_token_id": ids} if ids else {}
    for key, name in _SAMPLING_KEYS.items():
        value = header.metadata.get(f"general.sampling.{key}")
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            contents[name] = value if isinstance(value, int) else float(f"{value:.6g}")  # 0.2 of float32 is 0.2
    return contents


def _dtype(header: Header) -> str:
    """The type in which the model computes: that of the matrices where they have one, else bfloat16."""
    kinds = {info.type.name for info in header.tensors.values() if len(info.shape) > 1}
    if kinds == {"F32"}:
        return "float32"
    return "float16" if kinds <= {"F32", "F16"} else "bfloat16"


def _rope_scaling(
    values: Values, factors: Sequence[float] | None, theta: float, head_dim: int
) -> dict[str, Any] | None:
    if factors is not None:
        return _llama_3_scaling(factors, theta, head_dim)
    if values.prefix == "phi3" and values.text("rope.scaling.type", "none") == "longrope":
        return None  # what it needs is in tensors
    return rope_scaling_of(values)


def _llama_3_scaling(found: Sequence[float], theta: float, head_dim: int) -> dict[str, Any]:
    settings = _LLAMA_3_SETTINGS if len(found) == head_dim // 2 else ()  # a size may be any that the file says
    for factor, num_positions in settings:
        expected = llama_3_factors(factor, num_positions, theta, head_dim)
        if all(math.isclose(one, other, rel_tol=_FACTOR_TOLERANCE) for one, other in zip(found, expected, strict=True)):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": num_positions,
            }
    raise GGUFError("its factors of RoPE are not those of Llama 3.1 or 3.2.")


def llama_3_factors(factor: float, num_positions: int, theta: float, head_dim: int) -> list[float]:
    """The divisor of each frequency: 1 for short waves, `factor` for long ones, and between them smoothly."""
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
