"""Text in, text out: tokenizer, chat template, detokenizer, stop strings over an engine core, offline or async."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llmstack_llm.admit import AdmissionLimits, AdmittedRequest, admit_request, admit_sampling_params, check_fan_out
    from llmstack_llm.async_llm import AsyncLLM
    from llmstack_llm.async_llm import AsyncLLM as AsyncLLMEngine
    from llmstack_llm.beam_search import BeamSearchOutput, BeamSearchParams, BeamSearchSequence
    from llmstack_llm.engine_args import EngineArgs, UsageContext
    from llmstack_llm.llm import LLM
    from llmstack_llm.llm_engine import LLMEngine
    from llmstack_llm.model_config import ModelConfig
    from llmstack_llm.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
    from llmstack_llm.pooling_outputs import (
        ClassificationOutput,
        ClassificationRequestOutput,
        EmbeddingOutput,
        EmbeddingRequestOutput,
        PoolingOutput,
        PoolingRequestOutput,
        ScoringOutput,
        ScoringRequestOutput,
    )
    from llmstack_llm.pooling_prompt import TextPair
    from llmstack_llm.stats import FinishedRequestStats, IterationStats, LoggingStatLogger, StatLogger
    from llmstack_types import PoolingParams, PoolingTask, RequestOutputKind, SamplingParams

# Public name to the module that has it, imported on first use: a server needs no progress bar, a script no event loop.
_MODULES = {
    "LLM": "llm",
    "AdmissionLimits": "admit",
    "AdmittedRequest": "admit",
    "AsyncLLM": "async_llm",
    "AsyncLLMEngine": "async_llm",
    "BeamSearchOutput": "beam_search",
    "BeamSearchParams": "beam_search",
    "BeamSearchSequence": "beam_search",
    "ClassificationOutput": "pooling_outputs",
    "ClassificationRequestOutput": "pooling_outputs",
    "CompletionOutput": "outputs",
    "EmbeddingOutput": "pooling_outputs",
    "EmbeddingRequestOutput": "pooling_outputs",
    "EngineArgs": "engine_args",
    "FinishedRequestStats": "stats",
    "IterationStats": "stats",
    "LLMEngine": "llm_engine",
    "LoggingStatLogger": "stats",
    "Logprob": "outputs",
    "ModelConfig": "model_config",
    "PoolingOutput": "pooling_outputs",
    "PoolingRequestOutput": "pooling_outputs",
    "RequestMetrics": "outputs",
    "RequestOutput": "outputs",
    "ScoringOutput": "pooling_outputs",
    "ScoringRequestOutput": "pooling_outputs",
    "StatLogger": "stats",
    "TextPair": "pooling_prompt",
    "UsageContext": "engine_args",
    "admit_request": "admit",
    "admit_sampling_params": "admit",
    "check_fan_out": "admit",
}
_TYPES = ("PoolingParams", "PoolingTask", "RequestOutputKind", "SamplingParams")

__all__ = [
    "LLM",
    "AdmissionLimits",
    "AdmittedRequest",
    "AsyncLLM",
    "AsyncLLMEngine",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EngineArgs",
    "FinishedRequestStats",
    "IterationStats",
    "LLMEngine",
    "LoggingStatLogger",
    "Logprob",
    "ModelConfig",
    "PoolingOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "PoolingTask",
    "RequestMetrics",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "ScoringOutput",
    "ScoringRequestOutput",
    "StatLogger",
    "TextPair",
    "UsageContext",
    "admit_request",
    "admit_sampling_params",
    "check_fan_out",
]


def __getattr__(name: str) -> Any:
    if name in _TYPES:
        module = importlib.import_module("llmstack_types")
    elif name in _MODULES:
        module = importlib.import_module(f"{__name__}.{_MODULES[name]}")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(module, "AsyncLLM" if name == "AsyncLLMEngine" else name)


def __dir__() -> list[str]:
    return __all__
