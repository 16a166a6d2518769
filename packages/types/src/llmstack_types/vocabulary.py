"""Words that several packages share, as closed sets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

DType = Literal["auto", "float32", "bfloat16", "float16"]
KVCacheDType = Literal["auto", "bfloat16", "float16", "fp8"]
Device = Literal["auto", "cpu", "cuda"]
LoadFormat = Literal["auto", "safetensors", "mistral", "gguf", "dummy"]
ConfigFormat = Literal["auto", "mistral"]
TokenizerMode = Literal["auto", "mistral", "deepseek_v32", "deepseek_v4", "inkling"]
ModelImpl = Literal["auto", "llmstack", "transformers"]
RoundingScheme = Literal["int8", "int4", "fp8", "int8_dynamic", "int4_dynamic"]
GGUFActivations = Literal["auto", "rounded", "exact"]
CheckpointQuantization = Literal["fp8", "compressed-tensors", "awq", "gptq", "bitsandbytes", "mxfp4", "gguf"]
QuantizationScheme = Literal[RoundingScheme, CheckpointQuantization]
KVGroupKind = Literal["full", "window", "latent", "state", "content"]
FileKind = Literal["image", "video", "audio"]
MediaKind = Literal[FileKind, "embeds", "text"]
ImageDetail = Literal["auto", "low", "high", "original"]
LogprobsMode = Literal["raw_logprobs", "processed_logprobs"]
DistributedExecutorBackend = Literal["mp", "uni", "ray", "external_launcher"]
DataParallelBackend = Literal["mp", "ray"]
SchedulingPolicyName = Literal["fcfs", "priority", "fair", "deadline"]
RoutingPolicyName = Literal["exact", "load", "round_robin"]
AgentProfileName = Literal["steady", "spread", "tenants"]
"""How fast tools and people answer in made sessions of agents; see `llmstack_types.agent_profiles`."""
LoggingLevel = Literal["critical", "error", "warning", "info", "debug"]
LogFormat = Literal["text", "json"]
LogLevel = Literal[LoggingLevel, "trace"]
ContentFormat = Literal["auto", "string", "openai"]
TextPartType = Literal["input_text", "output_text", "text"]
StructuredOutputKind = Literal["json", "regex", "choice", "grammar", "json_object", "structural_tag"]

DTYPE_ALIASES: Mapping[str, str] = {"float": "float32", "half": "float16"}
"""Further names of `DType`."""

QUANTIZATION_ALIASES: Mapping[str, str] = {
    "awq_marlin": "awq", "gptq_marlin": "gptq", "fbgemm_fp8": "fp8", "modelopt": "fp8"
}  # fmt: skip
"""Further names of `QuantizationScheme`."""

KV_CACHE_DTYPE_ALIASES: Mapping[str, str] = {"fp8_e4m3": "fp8"}
"""Further names of `KVCacheDType`."""


def words_of(vocabulary: Any) -> tuple[str, ...]:
    """The words of one of these sets, in order; nested sets are flattened."""
    words: tuple[str, ...] = get_args(vocabulary)
    return words
