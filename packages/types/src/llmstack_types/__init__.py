"""The data that llmstack's packages exchange: standard library only, no behaviour.

Names are imported when they are first used: `llmstack --help` reads the errors and the vocabulary alone.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llmstack_types.adapters import LoRAIdentity
    from llmstack_types.control import Control, Operation
    from llmstack_types.engine_core import (
        EngineCoreOutput,
        EngineCoreOutputs,
        EngineCoreRequest,
        EngineReady,
        FinishReason,
        KVTransferParams,
        TokenLogprobs,
    )
    from llmstack_types.errors import (
        EngineDeadError,
        EngineLostError,
        EngineStartError,
        InvalidRequestError,
        LLMStackError,
        NoTokenAllowedError,
        NumericalError,
        QuarantinedError,
        RequestFailedError,
        ServerOverloadedError,
        TenantLimitError,
    )
    from llmstack_types.events import (
        BlockEviction,
        RequestEvent,
        RequestNote,
        RequestStatus,
        SessionReturn,
        StepPhases,
        StepRecord,
        StepRecording,
    )
    from llmstack_types.media import EncoderStats, EncoderWork, MediaItem, MediaMemory, MediaSpec, PrefixMedia
    from llmstack_types.model_runner import (
        KVCacheGroupSpec,
        KVCacheSpec,
        KVTensorSpec,
        ModelRunnerConfig,
        RankPlacement,
    )
    from llmstack_types.model_runner_output import ModelRunnerOutput
    from llmstack_types.pooling_params import PoolingParams, PoolingTask, PoolingType
    from llmstack_types.sampling_params import (
        RepetitionDetectionParams,
        RequestOutputKind,
        SamplingParams,
        ThinkingTags,
    )
    from llmstack_types.scheduler_output import NewRequest, ScheduledRequest, SchedulerOutput
    from llmstack_types.shadow import ShadowFigures, ShadowReport
    from llmstack_types.stats import DiskCacheStats, RequestProgress, SchedulerStats
    from llmstack_types.structured_outputs_params import StructuredOutputsParams
    from llmstack_types.token_masks import TokenMasks

# Public name to the module that has it.
_MODULES = {
    "BlockEviction": "events",
    "Control": "control",
    "DiskCacheStats": "stats",
    "EncoderStats": "media",
    "EncoderWork": "media",
    "EngineCoreOutput": "engine_core",
    "EngineCoreOutputs": "engine_core",
    "EngineCoreRequest": "engine_core",
    "EngineDeadError": "errors",
    "EngineLostError": "errors",
    "EngineReady": "engine_core",
    "EngineStartError": "errors",
    "FinishReason": "engine_core",
    "InvalidRequestError": "errors",
    "KVCacheGroupSpec": "model_runner",
    "KVCacheSpec": "model_runner",
    "KVTensorSpec": "model_runner",
    "KVTransferParams": "engine_core",
    "LLMStackError": "errors",
    "LoRAIdentity": "adapters",
    "MediaItem": "media",
    "MediaMemory": "media",
    "MediaSpec": "media",
    "ModelRunnerConfig": "model_runner",
    "ModelRunnerOutput": "model_runner_output",
    "NewRequest": "scheduler_output",
    "NoTokenAllowedError": "errors",
    "NumericalError": "errors",
    "Operation": "control",
    "PoolingParams": "pooling_params",
    "PoolingTask": "pooling_params",
    "PoolingType": "pooling_params",
    "PrefixMedia": "media",
    "QuarantinedError": "errors",
    "RankPlacement": "model_runner",
    "RequestEvent": "events",
    "RequestFailedError": "errors",
    "RequestNote": "events",
    "RepetitionDetectionParams": "sampling_params",
    "RequestOutputKind": "sampling_params",
    "RequestStatus": "events",
    "SamplingParams": "sampling_params",
    "ScheduledRequest": "scheduler_output",
    "SchedulerOutput": "scheduler_output",
    "RequestProgress": "stats",
    "SchedulerStats": "stats",
    "SessionReturn": "events",
    "ServerOverloadedError": "errors",
    "ShadowFigures": "shadow",
    "ShadowReport": "shadow",
    "StepPhases": "events",
    "StepRecord": "events",
    "StepRecording": "events",
    "StructuredOutputsParams": "structured_outputs_params",
    "TenantLimitError": "errors",
    "ThinkingTags": "sampling_params",
    "TokenLogprobs": "engine_core",
    "TokenMasks": "token_masks",
}

__all__ = [
    "BlockEviction",
    "Control",
    "DiskCacheStats",
    "EncoderStats",
    "EncoderWork",
    "EngineCoreOutput",
    "EngineCoreOutputs",
    "EngineCoreRequest",
    "EngineDeadError",
    "EngineLostError",
    "EngineReady",
    "EngineStartError",
    "FinishReason",
    "InvalidRequestError",
    "KVCacheGroupSpec",
    "KVCacheSpec",
    "KVTensorSpec",
    "KVTransferParams",
    "LLMStackError",
    "LoRAIdentity",
    "MediaItem",
    "MediaMemory",
    "MediaSpec",
    "ModelRunnerConfig",
    "ModelRunnerOutput",
    "NewRequest",
    "NoTokenAllowedError",
    "NumericalError",
    "Operation",
    "PoolingParams",
    "PoolingTask",
    "PoolingType",
    "PrefixMedia",
    "QuarantinedError",
    "RankPlacement",
    "RepetitionDetectionParams",
    "RequestEvent",
    "RequestFailedError",
    "RequestNote",
    "RequestOutputKind",
    "RequestProgress",
    "RequestStatus",
    "SamplingParams",
    "ScheduledRequest",
    "SchedulerOutput",
    "SchedulerStats",
    "ServerOverloadedError",
    "SessionReturn",
    "ShadowFigures",
    "ShadowReport",
    "StepPhases",
    "StepRecord",
    "StepRecording",
    "StructuredOutputsParams",
    "TenantLimitError",
    "ThinkingTags",
    "TokenLogprobs",
    "TokenMasks",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value  # the next access does not come here
    return value


def __dir__() -> list[str]:
    return __all__
