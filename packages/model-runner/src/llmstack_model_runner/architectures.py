"""The table of architectures, which installed packages may extend; needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any

ENTRY_POINT_GROUP = "llmstack.architectures"
OLD_GROUP = "llmstack.models_out_of_tree"
"""Name of the group before 0.2. Its entries are read until 0.3, with a deprecation line in the log."""

DRAFT_HEADS = frozenset(
    {"DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "Ernie4_5_MoeForCausalLM", "Glm4MoeForCausalLM",
     "MiMoForCausalLM", "NemotronHForCausalLM", "Qwen3NextForCausalLM", "Qwen3_5ForCausalLM",
     "Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"}
)  # fmt: skip
"""Architectures whose checkpoints may have a layer that guesses a further token, which is built."""

ARCHITECTURES: Mapping[str, str] = {
    "BambaForCausalLM": "llmstack_model_runner.models.bamba:Bamba",
    "BailingHybridForCausalLM": "llmstack_model_runner.models.kimi_linear:BailingHybrid",
    "BloomForCausalLM": "llmstack_model_runner.models.bloom:Bloom",
    "DeepseekV2ForCausalLM": "llmstack_model_runner.models.deepseek:DeepseekV2",
    "DeepseekV3ForCausalLM": "llmstack_model_runner.models.deepseek:DeepseekV3",
    "DeepseekV32ForCausalLM": "llmstack_model_runner.models.sparse_deepseek:DeepseekV32",
    "Ernie4_5ForCausalLM": "llmstack_model_runner.models.ernie:Ernie",
    "Ernie4_5_MoeForCausalLM": "llmstack_model_runner.models.ernie_moe:ErnieMoe",
    "FalconH1ForCausalLM": "llmstack_model_runner.models.falcon_h1:FalconH1",
    "FalconMambaForCausalLM": "llmstack_model_runner.models.mamba:FalconMamba",
    "FalconForCausalLM": "llmstack_model_runner.models.falcon:Falcon",
    "GPT2LMHeadModel": "llmstack_model_runner.models.gpt2:GPT2",
    "Glm4MoeForCausalLM": "llmstack_model_runner.models.glm4_moe:Glm4Moe",
    "GlmMoeDsaForCausalLM": "llmstack_model_runner.models.sparse_deepseek:GlmMoeDsa",
    "GPTJForCausalLM": "llmstack_model_runner.models.gptj:GPTJ",
    "GptOssForCausalLM": "llmstack_model_runner.models.gpt_oss:GptOss",
    "GPTNeoXForCausalLM": "llmstack_model_runner.models.gpt_neox:GPTNeoX",
    "Gemma2ForCausalLM": "llmstack_model_runner.models.gemma:Gemma2",
    "Gemma3ForCausalLM": "llmstack_model_runner.models.gemma:Gemma3",
    "Gemma4ForCausalLM": "llmstack_model_runner.models.gemma4:Gemma4",
    "Gemma4UnifiedForCausalLM": "llmstack_model_runner.models.gemma4:Gemma4Unified",
    "GemmaForCausalLM": "llmstack_model_runner.models.gemma:Gemma",
    "KimiLinearForCausalLM": "llmstack_model_runner.models.kimi_linear:KimiLinear",
    "Lfm2ForCausalLM": "llmstack_model_runner.models.lfm2:Lfm2",
    "Lfm2MoeForCausalLM": "llmstack_model_runner.models.lfm2:Lfm2Moe",
    "Lfm3ForCausalLM": "llmstack_model_runner.models.lfm2:Lfm3",
    "GraniteForCausalLM": "llmstack_model_runner.models.granite:Granite",
    "GraniteMoeHybridForCausalLM": "llmstack_model_runner.models.granite_hybrid:GraniteHybrid",
    "JambaForCausalLM": "llmstack_model_runner.models.jamba:Jamba",
    "LlamaForCausalLM": "llmstack_model_runner.models.llama:Llama",
    "MambaForCausalLM": "llmstack_model_runner.models.mamba:Mamba",
    "Mamba2ForCausalLM": "llmstack_model_runner.models.mamba2:Mamba2",
    "MiMoForCausalLM": "llmstack_model_runner.models.mimo:MiMo",
    "MiniMaxForCausalLM": "llmstack_model_runner.models.minimax:MiniMax",
    "Mistral4ForCausalLM": "llmstack_model_runner.models.deepseek:Mistral4",
    "MistralForCausalLM": "llmstack_model_runner.models.llama:Mistral",
    "MixtralForCausalLM": "llmstack_model_runner.models.mixture_of_experts:Mixtral",
    "NemotronHForCausalLM": "llmstack_model_runner.models.nemotron_h:NemotronH",
    "OlmoHybridForCausalLM": "llmstack_model_runner.models.olmo_hybrid:OlmoHybrid",
    "OPTForCausalLM": "llmstack_model_runner.models.opt:OPT",
    "Phi3ForCausalLM": "llmstack_model_runner.models.phi:Phi3",
    "PhiForCausalLM": "llmstack_model_runner.models.phi:Phi",
    "Qwen2ForCausalLM": "llmstack_model_runner.models.llama:Qwen2",
    "Qwen3_5ForCausalLM": "llmstack_model_runner.models.qwen3_next:Qwen3_5",
    "Qwen3_5MoeForCausalLM": "llmstack_model_runner.models.qwen3_next:Qwen3_5Moe",
    "Qwen3ForCausalLM": "llmstack_model_runner.models.llama:Qwen3",
    "Qwen3MoeForCausalLM": "llmstack_model_runner.models.mixture_of_experts:Qwen3Moe",
    "Qwen3NextForCausalLM": "llmstack_model_runner.models.qwen3_next:Qwen3Next",
    "StableLmForCausalLM": "llmstack_model_runner.models.stablelm:StableLM",
    "WhisperForConditionalGeneration": "llmstack_model_runner.models.whisper:Whisper",
    "Zamba2ForCausalLM": "llmstack_model_runner.models.zamba2:Zamba2",
}

# Of classes that take pictures: what makes their encoder. The text model is that of `text_config`.
PICTURE_ENCODERS: Mapping[str, str] = {
    "Gemma3ForConditionalGeneration": "llmstack_model_runner.models.gemma3_pictures:Gemma3Encoder",
    "Idefics3ForConditionalGeneration": "llmstack_model_runner.models.idefics3:Idefics3Encoder",
    "InternVLForConditionalGeneration": "llmstack_model_runner.models.internvl:InternVLEncoder",
    "LlavaForConditionalGeneration": "llmstack_model_runner.models.llava:LlavaEncoder",
    "LlavaNextForConditionalGeneration": "llmstack_model_runner.models.llava:LlavaNextEncoder",
    "Mistral3ForConditionalGeneration": "llmstack_model_runner.models.mistral3:Mistral3Encoder",
    "Qwen2VLForConditionalGeneration": "llmstack_model_runner.models.qwen_vl:QwenVLEncoder",
    "Qwen2_5_VLForConditionalGeneration": "llmstack_model_runner.models.qwen_vl:Qwen2_5VLEncoder",
    "Qwen3VLForConditionalGeneration": "llmstack_model_runner.models.qwen_vl:Qwen3VLEncoder",
    "Qwen3VLMoeForConditionalGeneration": "llmstack_model_runner.models.qwen_vl:Qwen3VLEncoder",
    "Qwen3_5ForConditionalGeneration": "llmstack_model_runner.models.qwen_vl:Qwen3_5Encoder",
    "Qwen3_5MoeForConditionalGeneration": "llmstack_model_runner.models.qwen_vl:Qwen3_5Encoder",
    "SmolVLMForConditionalGeneration": "llmstack_model_runner.models.idefics3:Idefics3Encoder",
}

# Of classes that take sound in chats, the same.
SOUND_ENCODERS: Mapping[str, str] = {
    "GraniteSpeechForConditionalGeneration": (
        "llmstack_model_runner.models.transformers_backend.sounds:GraniteSpeechSounds"
    ),
    "Qwen2AudioForConditionalGeneration": "llmstack_model_runner.models.qwen2_audio:Qwen2AudioEncoder",
    "Qwen2_5OmniForConditionalGeneration": "llmstack_model_runner.models.qwen_omni:Qwen2_5OmniEncoder",
    "Qwen2_5OmniModel": "llmstack_model_runner.models.qwen_omni:Qwen2_5OmniEncoder",
    "Qwen2_5OmniThinkerForConditionalGeneration": "llmstack_model_runner.models.qwen_omni:Qwen2_5OmniEncoder",
    "VoxtralForConditionalGeneration": "llmstack_model_runner.models.voxtral:VoxtralEncoder",
}

# Types of `vision_config` that such an encoder reads, where a class has several; that of an absent one comes first.
TOWERS_OF: Mapping[str, tuple[str, ...]] = {
    "LlavaForConditionalGeneration": ("clip_vision_model",),
    "LlavaNextForConditionalGeneration": ("clip_vision_model",),
    "Mistral3ForConditionalGeneration": ("pixtral",),
}

# Classes and towers whose encoder is that of the package transformers, in the same order. The text model is as above.
BACKEND_TOWERS: Mapping[str, tuple[str, ...]] = {
    "AyaVisionForConditionalGeneration": ("siglip_vision_model",),
    "Gemma4ForConditionalGeneration": ("gemma4_vision",),
    "LightOnOcrForConditionalGeneration": ("pixtral",),
    "LlavaForConditionalGeneration": ("siglip_vision_model", "pixtral"),
    "LlavaNextForConditionalGeneration": ("siglip_vision_model",),
    "LlavaOnevisionForConditionalGeneration": ("siglip_vision_model",),
    "VipLlavaForConditionalGeneration": ("clip_vision_model",),
}
BACKEND_ENCODER = "llmstack_model_runner.models.transformers_backend.pictures:BackendEncoders"

# The head of a masked language model is not loaded.
ENCODERS: Mapping[str, str] = {
    "BertForMaskedLM": "llmstack_model_runner.models.bert:Bert",
    "BertForSequenceClassification": "llmstack_model_runner.models.encoder_classifier:BertClassifier",
    "BertModel": "llmstack_model_runner.models.bert:Bert",
    "DistilBertForMaskedLM": "llmstack_model_runner.models.distilbert:DistilBert",
    "DistilBertForSequenceClassification": "llmstack_model_runner.models.encoder_classifier:DistilBertClassifier",
    "DistilBertModel": "llmstack_model_runner.models.distilbert:DistilBert",
    "HF_ColBERT": "llmstack_model_runner.models.bert:ColBert",
    "RobertaForMaskedLM": "llmstack_model_runner.models.bert:Roberta",
    "RobertaForSequenceClassification": "llmstack_model_runner.models.encoder_classifier:RobertaClassifier",
    "RobertaModel": "llmstack_model_runner.models.bert:Roberta",
    "XLMRobertaForMaskedLM": "llmstack_model_runner.models.bert:Roberta",
    "XLMRobertaForSequenceClassification": "llmstack_model_runner.models.encoder_classifier:RobertaClassifier",
    "XLMRobertaModel": "llmstack_model_runner.models.bert:Roberta",
}

# Decoders for pooling: architecture to the causal language model it is built from, and the class that wraps it.
POOLING_DECODERS: Mapping[str, tuple[str, str]] = {
    f"{family}{suffix}": (decoder, base)
    for family, decoder in {
        "GPT2": "GPT2LMHeadModel",
        "Llama": "LlamaForCausalLM",
        "Mistral": "MistralForCausalLM",
        "Qwen2": "Qwen2ForCausalLM",
        "Qwen3": "Qwen3ForCausalLM",
    }.items()
    for suffix, base in {"Model": "PoolingDecoder", "ForSequenceClassification": "DecoderClassifier"}.items()
}


def encoder_of(whole: Mapping[str, Any]) -> str | None:
    """The maker of the encoder of a configuration with all parts; None where no code here has its tower."""
    name = str(next(iter(whole.get("architectures") or ()), ""))
    if name in SOUND_ENCODERS:
        return SOUND_ENCODERS[name]
    vision = whole.get("vision_config")
    tower = vision.get("model_type") if isinstance(vision, Mapping) else None
    own, others = TOWERS_OF.get(name, ()), BACKEND_TOWERS.get(name, ())
    if name in PICTURE_ENCODERS and (not own or tower is None or tower in own):
        return PICTURE_ENCODERS[name]
    return BACKEND_ENCODER if others and (tower is None or tower in others) else None


def is_supported(architecture: str) -> bool:
    """Whether `load_model_class` knows it; installed packages are searched only for those of other teams."""
    own: tuple[Mapping[str, object], ...] = (ARCHITECTURES, ENCODERS, POOLING_DECODERS)
    return any(architecture in table for table in own) or architecture in installed_architectures()


def supported_architectures() -> list[str]:
    """Names that `load_model_class` knows, including those of installed packages."""
    return sorted({*ARCHITECTURES, *ENCODERS, *POOLING_DECODERS, *installed_architectures()})


def installed_architectures() -> dict[str, EntryPoint]:
    """Architecture to the entry point of the package that adds it; the current group wins over the old one."""
    return {entry.name: entry for group in (OLD_GROUP, ENTRY_POINT_GROUP) for entry in entry_points(group=group)}
