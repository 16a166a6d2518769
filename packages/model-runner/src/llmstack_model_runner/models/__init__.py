"""The models: a closed table from the name in a configuration to a class, which installed packages may extend."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any

from llmstack_model_runner.models.base import CausalLM, Classifier, Encoder, Model, ModelKVSpec

__all__ = [
    "ENTRY_POINT_GROUP",
    "CausalLM",
    "Classifier",
    "Encoder",
    "Model",
    "ModelKVSpec",
    "load_model_class",
    "supported_architectures",
]

ENTRY_POINT_GROUP = "llmstack.models_out_of_tree"

_ARCHITECTURES: Mapping[str, str] = {
    "BloomForCausalLM": "llmstack_model_runner.models.bloom:Bloom",
    "FalconForCausalLM": "llmstack_model_runner.models.falcon:Falcon",
    "GPT2LMHeadModel": "llmstack_model_runner.models.gpt2:GPT2",
    "GPTJForCausalLM": "llmstack_model_runner.models.gptj:GPTJ",
    "GPTNeoXForCausalLM": "llmstack_model_runner.models.gpt_neox:GPTNeoX",
    "Gemma2ForCausalLM": "llmstack_model_runner.models.gemma:Gemma2",
    "Gemma3ForCausalLM": "llmstack_model_runner.models.gemma:Gemma3",
    "Gemma3ForConditionalGeneration": "llmstack_model_runner.models.gemma:Gemma3WithVision",
    "GemmaForCausalLM": "llmstack_model_runner.models.gemma:Gemma",
    "LlamaForCausalLM": "llmstack_model_runner.models.llama:Llama",
    "MistralForCausalLM": "llmstack_model_runner.models.llama:Mistral",
    "MixtralForCausalLM": "llmstack_model_runner.models.mixture_of_experts:Mixtral",
    "OPTForCausalLM": "llmstack_model_runner.models.opt:OPT",
    "Phi3ForCausalLM": "llmstack_model_runner.models.phi3:Phi3",
    "PhiForCausalLM": "llmstack_model_runner.models.phi:Phi",
    "Qwen2ForCausalLM": "llmstack_model_runner.models.llama:Qwen2",
    "Qwen3ForCausalLM": "llmstack_model_runner.models.llama:Qwen3",
    "Qwen3MoeForCausalLM": "llmstack_model_runner.models.mixture_of_experts:Qwen3Moe",
    "StableLmForCausalLM": "llmstack_model_runner.models.stablelm:StableLM",
}

# The head of a masked language model is not loaded.
_ENCODERS: Mapping[str, str] = {
    "BertForMaskedLM": "llmstack_model_runner.models.bert:Bert",
    "BertForSequenceClassification": "llmstack_model_runner.models.encoder_classifier:BertClassifier",
    "BertModel": "llmstack_model_runner.models.bert:Bert",
    "DistilBertForMaskedLM": "llmstack_model_runner.models.distilbert:DistilBert",
    "DistilBertForSequenceClassification": "llmstack_model_runner.models.encoder_classifier:DistilBertClassifier",
    "DistilBertModel": "llmstack_model_runner.models.distilbert:DistilBert",
    "RobertaForMaskedLM": "llmstack_model_runner.models.bert:Roberta",
    "RobertaForSequenceClassification": "llmstack_model_runner.models.encoder_classifier:RobertaClassifier",
    "RobertaModel": "llmstack_model_runner.models.bert:Roberta",
    "XLMRobertaForMaskedLM": "llmstack_model_runner.models.bert:Roberta",
    "XLMRobertaForSequenceClassification": "llmstack_model_runner.models.encoder_classifier:RobertaClassifier",
    "XLMRobertaModel": "llmstack_model_runner.models.bert:Roberta",
}

# Decoders that only pool: the class over which, by the decoder that it is.
_HEADLESS: Mapping[str, tuple[str, str]] = {
    f"{family}{suffix}": (decoder, base)
    for family, decoder in {
        "GPT2": "GPT2LMHeadModel",
        "Llama": "LlamaForCausalLM",
        "Mistral": "MistralForCausalLM",
        "Qwen2": "Qwen2ForCausalLM",
        "Qwen3": "Qwen3ForCausalLM",
    }.items()
    for suffix, base in {"Model": "HeadlessDecoder", "ForSequenceClassification": "DecoderClassifier"}.items()
}


def supported_architectures() -> list[str]:
    """Names that `load_model_class` knows, installed packages' included."""
    return sorted(
        {*_ARCHITECTURES, *_ENCODERS, *_HEADLESS, *(entry.name for entry in entry_points(group=ENTRY_POINT_GROUP))}
    )


def load_model_class(architecture: str) -> type[Model]:
    """The class for an entry of `architectures` in a config.json.

    Raises:
        ValueError: Nobody knows the architecture; the text lists those that are known.
    """
    if architecture in _HEADLESS:
        return _load_headless(*_HEADLESS[architecture])
    target = _ARCHITECTURES.get(architecture) or _ENCODERS.get(architecture)
    if target is None:
        for entry in entry_points(group=ENTRY_POINT_GROUP, name=architecture):
            loaded: type[Model] = entry.load()
            return loaded
        raise ValueError(
            f"Model architecture {architecture[:64]!r} is not supported; "
            f"supported are {', '.join(supported_architectures())}."
        )
    model_class: type[Model] = _import(target)
    return model_class


def _load_headless(decoder: str, base: str) -> type[Model]:
    from llmstack_model_runner.models import headless

    return headless.make_headless(_import(_ARCHITECTURES[decoder]), getattr(headless, base))


def _import(target: str) -> Any:
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)
