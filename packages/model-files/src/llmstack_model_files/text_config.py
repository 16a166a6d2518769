"""Configurations of the text models of models with parts for images or sound."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from llmstack_model_files.config_defaults import with_defaults

TEXT_PART_OF: Final = "text_part_of"
"""Field of a text model's configuration: the architecture that it is a part of."""
WHOLE_CONFIG: Final = "whole_config"
"""Field of the same: the configuration of the whole, as it was found."""


class _Whole(NamedTuple):
    """A class of several parts: type of its text model unless the configuration says it, and further defaults."""

    text_type: str
    is_tied: bool = False
    field: str = "text_config"
    defaults: Mapping[str, Any] = {}


class _Text(NamedTuple):
    """The class that a text model has by itself, and fields that are not its to choose."""

    architecture: str
    model_type: str
    fixed: Mapping[str, Any] = {}


_VOXTRAL: Mapping[str, Any] = {
    "vocab_size": 131_072,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 30,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e8,
    "head_dim": 128,
}
WHOLES: Mapping[str, _Whole] = {
    "AyaVisionForConditionalGeneration": _Whole("cohere2", is_tied=True),
    "Dots3NoteForCausalLM": _Whole("dots3_note_text"),
    "Dots3NoteForConditionalGeneration": _Whole("dots3_note_text"),
    "Gemma3ForConditionalGeneration": _Whole("gemma3_text", is_tied=True),
    "Gemma3nForConditionalGeneration": _Whole("gemma3n_text", is_tied=True),
    "Gemma4ForConditionalGeneration": _Whole("gemma4_text", is_tied=True),
    "Gemma4UnifiedForConditionalGeneration": _Whole("gemma4_unified_text", is_tied=True),
    "GraniteSpeechForConditionalGeneration": _Whole("granite", is_tied=True),
    "Idefics3ForConditionalGeneration": _Whole("llama"),
    "InternVLChatModel": _Whole("qwen2", field="llm_config"),
    "InternVLForConditionalGeneration": _Whole("qwen2", is_tied=True),
    "LightOnOcrForConditionalGeneration": _Whole("qwen3"),
    "LlavaForConditionalGeneration": _Whole("llama"),
    "LlavaNextForConditionalGeneration": _Whole("llama"),
    "LlavaOnevisionForConditionalGeneration": _Whole("qwen2"),
    "Mistral3ForConditionalGeneration": _Whole("mistral", is_tied=True),
    "Qwen2AudioForConditionalGeneration": _Whole("qwen2"),
    "Qwen2VLForConditionalGeneration": _Whole("qwen2_vl_text"),
    "Qwen2_5OmniForConditionalGeneration": _Whole("qwen2_5_omni_text"),
    "Qwen2_5OmniModel": _Whole("qwen2_5_omni_text"),
    "Qwen2_5OmniThinkerForConditionalGeneration": _Whole("qwen2_5_omni_text"),
    "Qwen2_5_VLForConditionalGeneration": _Whole("qwen2_5_vl_text"),
    "Qwen3VLForConditionalGeneration": _Whole("qwen3_vl_text"),
    "Qwen3VLMoeForConditionalGeneration": _Whole("qwen3_vl_moe_text"),
    "Qwen3_5ForConditionalGeneration": _Whole("qwen3_5_text"),
    "Qwen3_5MoeForConditionalGeneration": _Whole("qwen3_5_moe_text"),
    "SmolVLMForConditionalGeneration": _Whole("llama"),
    "VipLlavaForConditionalGeneration": _Whole("llama"),
    "VoxtralForConditionalGeneration": _Whole("llama", defaults=_VOXTRAL),
}
# Positions of three axes (mrope) are equal for text, so Qwen-VL's text models are Qwen's.
TEXT_TYPES: Mapping[str, _Text] = {
    "cohere2": _Text("Cohere2ForCausalLM", "cohere2"),
    "dots3_note_text": _Text("Dots3NoteForCausalLM", "dots3_note_text"),
    "gemma": _Text("GemmaForCausalLM", "gemma"),
    "gemma2": _Text("Gemma2ForCausalLM", "gemma2"),
    "gemma3_text": _Text("Gemma3ForCausalLM", "gemma3_text"),
    "gemma3n_text": _Text("Gemma3nForCausalLM", "gemma3n_text"),
    "gemma4_text": _Text("Gemma4ForCausalLM", "gemma4_text"),
    "gemma4_unified_text": _Text("Gemma4UnifiedForCausalLM", "gemma4_unified_text"),
    "gpt_oss": _Text("GptOssForCausalLM", "gpt_oss"),
    "granite": _Text("GraniteForCausalLM", "granite"),
    "llama": _Text("LlamaForCausalLM", "llama"),
    "ministral3": _Text("Ministral3ForCausalLM", "ministral3"),
    "mistral4": _Text("Mistral4ForCausalLM", "mistral4"),
    "mistral": _Text("MistralForCausalLM", "mistral"),
    "phi3": _Text("Phi3ForCausalLM", "phi3"),
    "qwen2": _Text("Qwen2ForCausalLM", "qwen2"),
    "qwen2_5_omni_text": _Text("Qwen2ForCausalLM", "qwen2"),
    "qwen2_5_vl_text": _Text("Qwen2ForCausalLM", "qwen2"),
    "qwen2_vl_text": _Text("Qwen2ForCausalLM", "qwen2"),
    "qwen3_5_moe_text": _Text("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text"),
    "qwen3_5_text": _Text("Qwen3_5ForCausalLM", "qwen3_5_text"),
    "qwen3": _Text("Qwen3ForCausalLM", "qwen3"),
    "qwen3_moe": _Text("Qwen3MoeForCausalLM", "qwen3_moe"),
    "qwen3_vl_moe_text": _Text(
        "Qwen3MoeForCausalLM", "qwen3_moe", {"norm_topk_prob": True, "use_sliding_window": False}
    ),
    "qwen3_vl_text": _Text("Qwen3ForCausalLM", "qwen3", {"use_sliding_window": False}),
}
# Fields of the whole that hold for the text model too.
_COMMON = ("bos_token_id", "compression_config", "dtype", "eos_token_id", "pad_token_id", "quantization_config",
           "tie_word_embeddings", "torch_dtype")  # fmt: skip
# Whose published configurations have the text model's fields beside the rest.
_FLAT_TYPES = ("dots3_note", "qwen2_vl", "qwen2_5_vl")
_NOT_OF_TEXT = ("model_type", "audio_config", "vision_config")


def text_config_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of the text model, for a class in `WHOLES`; other configurations are returned unchanged."""
    config = _without_speaker(config)
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""
    whole = WHOLES.get(name)
    found = None if whole is None else config.get(whole.field)
    if whole is not None and found is None and config.get("model_type") in _FLAT_TYPES:
        found = {key: value for key, value in config.items() if key not in _NOT_OF_TEXT}
    if whole is None or not isinstance(found, Mapping):
        return dict(config)
    text_type = str(found.get("model_type") or whole.text_type)
    text = TEXT_TYPES.get(text_type)
    if text is None:
        return dict(config)
    common = {key: config[key] for key in _COMMON if config.get(key) is not None}
    given = {"tie_word_embeddings": whole.is_tied, **common, **whole.defaults, **found, "model_type": text_type}
    completed = with_defaults(given)
    rope = {key: _of_text(completed[key]) for key in ("rope_parameters", "rope_scaling") if completed.get(key)}
    own: dict[str, Any] = {
        "architectures": [text.architecture], "model_type": text.model_type, TEXT_PART_OF: name,
        WHOLE_CONFIG: dict(config),
    }  # fmt: skip
    if "tie_word_embeddings" in config:
        own["tie_word_embeddings"] = bool(config["tie_word_embeddings"]) or found.get("tie_word_embeddings") is True
    return {**completed, **rope, **text.fixed, **own}


def _without_speaker(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a configuration for text, where another part speaks; any other configuration as it is."""
    thinker = config.get("thinker_config")
    if config.get("model_type") != "qwen2_5_omni" or not isinstance(thinker, Mapping):
        return config
    common = {key: config[key] for key in ("architectures", *_COMMON) if config.get(key) is not None}
    return {**common, **thinker, "architectures": config.get("architectures")}


def _of_text(rope: Any) -> Any:
    """A rotary embedding of three axes, as text has it."""
    if not isinstance(rope, Mapping) or "mrope" not in (rope.get("type"), rope.get("rope_type")):
        return rope
    return {**{key: value for key, value in rope.items() if key != "type"}, "rope_type": "default"}
