"""Kinds of models that no code here runs, by their configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_STATE_SPACE = frozenset({"rwkv", "rwkv6", "rwkv7", "recurrent_gemma", "xlstm"})
_HYBRID = frozenset({"zamba", "plamo2"})
_ENCODER_DECODERS = frozenset(
    {"t5", "mt5", "umt5", "longt5", "bart", "mbart", "pegasus", "pegasus_x", "marian", "m2m_100", "blenderbot",
     "blenderbot-small", "led", "fsmt", "prophetnet", "switch_transformers", "nllb-moe", "t5gemma"}
)  # fmt: skip
_TRIED = ("EncoderModel", "ForConditionalGeneration", "MTModel")
_SPEECH = frozenset(
    {"whisper", "speech_to_text", "seamless_m4t", "seamless_m4t_v2", "moonshine", "wav2vec2", "hubert",
     "granite_speech_plus"}
)  # fmt: skip
_OF_IMAGES = ("vision_config", "vision_tower", "visual", "mm_vision_tower", "vit_config")
# Parts of names of classes that read no text.
_IMAGE_TASKS = ("ForImage", "ForObjectDetection", "ForSemanticSegmentation", "ForDepthEstimation", "ForVideo")
_SPEECH_TASKS = ("ForAudio", "ForSpeech", "ForCTC")
_OF_SPEECH = ("audio_config", "speech_config", "audio_encoder_config")


def unsupported_kind(config: Mapping[str, Any]) -> str | None:
    """The kind of an unsupported model, such as `an encoder-decoder model`; None for any other one.

    `config`: All of `config.json`.
    """
    model_type = str(config.get("model_type", ""))
    name = str(next(iter(config.get("architectures") or []), ""))
    if name == "BgeM3EmbeddingModel":
        return "a model whose sparse and multi-vector heads are pickles, which are never read"
    if any(task in name for task in _IMAGE_TASKS):
        return "a vision model without text"
    is_of_speech = model_type in _SPEECH or any(task in name for task in _SPEECH_TASKS)
    if is_of_speech or any(config.get(key) for key in _OF_SPEECH):
        return "a model of speech"
    if any(config.get(key) for key in _OF_IMAGES):
        return "a vision model, for images beside text"
    is_tried = name.endswith(_TRIED)  # the code of transformers says whether it serves such a class
    if (config.get("is_encoder_decoder") is True or model_type in _ENCODER_DECODERS) and not is_tried:
        return "an encoder-decoder model"
    if model_type in _STATE_SPACE:
        return "a state-space model"
    if model_type in _HYBRID:
        return "a hybrid of attention and recurrent layers"
    return None
