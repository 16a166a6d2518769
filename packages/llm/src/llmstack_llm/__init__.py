"""Text in, text out over an engine core, offline or asynchronous."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmstack_llm.adapters import LoRARequest
    from llmstack_llm.admission.limits import AdmissionLimits, check_fan_out
    from llmstack_llm.admission.sampling import CheckedSampling, GivenSampling
    from llmstack_llm.async_llm import AsyncLLM
    from llmstack_llm.async_llm import AsyncLLM as AsyncLLMEngine
    from llmstack_llm.engine_args import EngineArgs, EngineArgsError, UsageContext
    from llmstack_llm.engine_args import EngineArgs as AsyncEngineArgs
    from llmstack_llm.model.config import ModelConfig
    from llmstack_llm.offline.beam_search import BeamSearchOutput, BeamSearchParams, BeamSearchSequence
    from llmstack_llm.offline.llm import LLM
    from llmstack_llm.offline.llm_engine import LLMEngine
    from llmstack_llm.outputs.observers import RequestObserver, SubmittedRequest
    from llmstack_llm.outputs.request_output import CompletionOutput, Logprob, RequestMetrics, RequestOutput
    from llmstack_llm.outputs.stats import FinishedRequestStats, IterationStats, LoggingStatLogger, StatLogger
    from llmstack_llm.outputs.stream import GenerationStream
    from llmstack_llm.pooling.outputs import (
        ClassificationOutput,
        ClassificationRequestOutput,
        EmbeddingOutput,
        EmbeddingRequestOutput,
        PoolingOutput,
        PoolingRequestOutput,
        ScoringOutput,
        ScoringRequestOutput,
    )
    from llmstack_llm.pooling.prompt import TextPair
    from llmstack_llm.requests import (
        ChatPrompt,
        GenerationRequest,
        PromptInput,
        RenderedPrompt,
        TextPrompt,
        TokensPrompt,
    )
    from llmstack_types import (
        EngineDeadError,
        EngineStartError,
        InvalidRequestError,
        LLMStackError,
        PoolingParams,
        PoolingTask,
        RepetitionDetectionParams,
        RequestFailedError,
        RequestOutputKind,
        SamplingParams,
        ServerOverloadedError,
        StructuredOutputsParams,
    )

# Public name to the module that has it, imported on first use: a server needs no progress bar, a script no event loop.
_MODULES = {
    "LLM": "offline.llm",
    "AdmissionLimits": "admission.limits",
    "AsyncEngineArgs": "engine_args",
    "AsyncLLM": "async_llm",
    "AsyncLLMEngine": "async_llm",
    "BeamSearchOutput": "offline.beam_search",
    "BeamSearchParams": "offline.beam_search",
    "BeamSearchSequence": "offline.beam_search",
    "ChatPrompt": "requests",
    "CheckedSampling": "admission.sampling",
    "ClassificationOutput": "pooling.outputs",
    "ClassificationRequestOutput": "pooling.outputs",
    "CompletionOutput": "outputs.request_output",
    "EmbeddingOutput": "pooling.outputs",
    "EmbeddingRequestOutput": "pooling.outputs",
    "EngineArgs": "engine_args",
    "EngineArgsError": "engine_args",
    "FinishedRequestStats": "outputs.stats",
    "GenerationRequest": "requests",
    "GenerationStream": "outputs.stream",
    "GivenSampling": "admission.sampling",
    "IterationStats": "outputs.stats",
    "LLMEngine": "offline.llm_engine",
    "LoRARequest": "adapters",
    "LoggingStatLogger": "outputs.stats",
    "Logprob": "outputs.request_output",
    "ModelConfig": "model.config",
    "PoolingOutput": "pooling.outputs",
    "PoolingRequestOutput": "pooling.outputs",
    "PromptInput": "requests",
    "RenderedPrompt": "requests",
    "RequestMetrics": "outputs.request_output",
    "RequestObserver": "outputs.observers",
    "RequestOutput": "outputs.request_output",
    "ScoringOutput": "pooling.outputs",
    "ScoringRequestOutput": "pooling.outputs",
    "StatLogger": "outputs.stats",
    "SubmittedRequest": "outputs.observers",
    "TextPair": "pooling.prompt",
    "TextPrompt": "requests",
    "TokensPrompt": "requests",
    "UsageContext": "engine_args",
    "check_fan_out": "admission.limits",
}
_TYPES = (
    "EngineDeadError", "EngineStartError", "InvalidRequestError", "LLMStackError", "PoolingParams", "PoolingTask",
    "RepetitionDetectionParams", "RequestFailedError", "RequestOutputKind", "SamplingParams", "ServerOverloadedError",
    "StructuredOutputsParams",
)  # fmt: skip
# Names of vLLM's for the same thing.
_SAME = {"AsyncEngineArgs": "EngineArgs", "AsyncLLMEngine": "AsyncLLM"}

__all__ = [
    "LLM",
    "AdmissionLimits",
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "ChatPrompt",
    "CheckedSampling",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EngineArgs",
    "EngineArgsError",
    "EngineDeadError",
    "EngineStartError",
    "FinishedRequestStats",
    "GenerationRequest",
    "GenerationStream",
    "GivenSampling",
    "InvalidRequestError",
    "IterationStats",
    "LLMEngine",
    "LLMStackError",
    "LoRARequest",
    "LoggingStatLogger",
    "Logprob",
    "ModelConfig",
    "PoolingOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "PoolingTask",
    "PromptInput",
    "RenderedPrompt",
    "RepetitionDetectionParams",
    "RequestFailedError",
    "RequestMetrics",
    "RequestObserver",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "ScoringOutput",
    "ScoringRequestOutput",
    "ServerOverloadedError",
    "StatLogger",
    "StructuredOutputsParams",
    "SubmittedRequest",
    "TextPair",
    "TextPrompt",
    "TokensPrompt",
    "UsageContext",
    "check_fan_out",
]


def __getattr__(name: str) -> object:
    if name in _TYPES:
        module = importlib.import_module("llmstack_types")
    elif name in _MODULES:
        module = importlib.import_module(f"{__name__}.{_MODULES[name]}")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(module, _SAME.get(name, name))


def __dir__() -> list[str]:
    return __all__
