"""Code in model repositories: it never runs, and some repositories do not need it."""

from __future__ import annotations

import logging
from collections.abc import Mapping

logger = logging.getLogger(__name__)

# Architecture to the model type and the family that its classes are named after. Repositories that still carry the
# code of these models carry the code that transformers has since; llmstack has the models itself.
_KNOWN: Mapping[str, tuple[str, str]] = {
    "BloomForCausalLM": ("bloom", "Bloom"),
    "DeepseekV2ForCausalLM": ("deepseek_v2", "DeepseekV2"),
    "DeepseekV3ForCausalLM": ("deepseek_v3", "DeepseekV3"),
    "FalconForCausalLM": ("falcon", "Falcon"),
    "GPTNeoXForCausalLM": ("gpt_neox", "GPTNeoX"),
    "GptOssForCausalLM": ("gpt_oss", "GptOss"),
    "GemmaForCausalLM": ("gemma", "Gemma"),
    "Gemma2ForCausalLM": ("gemma2", "Gemma2"),
    "LlamaForCausalLM": ("llama", "Llama"),
    "MiMoForCausalLM": ("mimo", "MiMo"),
    "MistralForCausalLM": ("mistral", "Mistral"),
    "MixtralForCausalLM": ("mixtral", "Mixtral"),
    "Phi3ForCausalLM": ("phi3", "Phi3"),
    "PhiForCausalLM": ("phi", "Phi"),
    "Qwen2ForCausalLM": ("qwen2", "Qwen2"),
    "Qwen3ForCausalLM": ("qwen3", "Qwen3"),
    "Qwen3MoeForCausalLM": ("qwen3_moe", "Qwen3Moe"),
    "StableLmForCausalLM": ("stablelm", "StableLm"),
}
# Model types whose configuration and classes are those of another one.
_SAME_AS: Mapping[str, str] = {"kimi_k2": "deepseek_v3"}
_SUFFIXES = ("Config", "Model", "PreTrainedModel", "ForCausalLM", "ForSequenceClassification", "ForTokenClassification",
             "ForQuestionAnswering")  # fmt: skip
_MAX_NAMED = 4


def repository_code_problem(config: Mapping[str, object]) -> str | None:
    """Why a model cannot be served without the code of its repository; None where it can.

    `config`: All of `config.json`.
    """
    auto_map = config.get("auto_map")
    if not auto_map:
        return None
    classes = _class_names(auto_map)
    architectures = config.get("architectures")
    architecture = architectures[0] if isinstance(architectures, list) and architectures else None
    model_type, family = _KNOWN.get(architecture, (None, "")) if isinstance(architecture, str) else (None, "")
    known = {f"{family}{suffix}" for suffix in _SUFFIXES}
    own_type = str(config.get("model_type"))
    if model_type is not None and _SAME_AS.get(own_type, own_type) == model_type and classes <= known:
        return None
    named = ", ".join(sorted(classes - known)[:_MAX_NAMED]) or "classes of another model type"
    return (
        f"config.json: auto_map: the repository has code of its own ({named:.200}), and code from a repository never "
        "runs; leave out trust_remote_code to serve the model with the code of llmstack or transformers"
    )


def warn_about_code(config: Mapping[str, object]) -> None:
    """Logs that `trust_remote_code` has no effect with this model."""
    what = "llmstack has this model itself" if config.get("auto_map") else "the repository has no code"
    logger.warning("trust_remote_code has no effect: %s", what)


def _class_names(auto_map: object) -> set[str]:
    """The last part of each name, such as `Phi3Config` of `configuration_phi3.Phi3Config`."""
    values = auto_map.values() if isinstance(auto_map, Mapping) else [auto_map]
    flat = [name for value in values for name in (value if isinstance(value, list) else [value])]
    return {str(name).rpartition(".")[2] for name in flat if name is not None}
