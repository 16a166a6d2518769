"""The data that llmstack's packages exchange: standard library only, no behaviour."""

from llmstack_types.engine_core import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineReady,
    FinishReason,
    TokenLogprobs,
)
from llmstack_types.errors import (
    EngineDeadError,
    EngineLostError,
    EngineStartError,
    InvalidRequestError,
    LLMStackError,
    NumericalError,
    QuarantinedError,
    RequestFailedError,
    ServerOverloadedError,
)
from llmstack_types.events import (
    BlockEviction,
    RequestEvent,
    RequestStatus,
    StepPhases,
    StepRecord,
    StepRecording,
)
from llmstack_types.model_runner import KVCacheSpec, ModelRunnerConfig
from llmstack_types.model_runner_output import ModelRunnerOutput
from llmstack_types.pooling_params import PoolingParams, PoolingTask, PoolingType
from llmstack_types.sampling_params import RequestOutputKind, SamplingParams
from llmstack_types.scheduler_output import NewRequest, ScheduledRequest, SchedulerOutput
from llmstack_types.stats import SchedulerStats
from llmstack_types.structured_outputs_params import StructuredOutputsParams
from llmstack_types.token_masks import TokenMasks

__all__ = [
    "BlockEviction",
    "EngineCoreOutput",
    "EngineCoreOutputs",
    "EngineCoreRequest",
    "EngineDeadError",
    "EngineLostError",
    "EngineReady",
    "EngineStartError",
    "FinishReason",
    "InvalidRequestError",
    "KVCacheSpec",
    "LLMStackError",
    "ModelRunnerConfig",
    "ModelRunnerOutput",
    "NewRequest",
    "NumericalError",
    "PoolingParams",
    "PoolingTask",
    "PoolingType",
    "QuarantinedError",
    "RequestEvent",
    "RequestFailedError",
    "RequestOutputKind",
    "RequestStatus",
    "SamplingParams",
    "ScheduledRequest",
    "SchedulerOutput",
    "SchedulerStats",
    "ServerOverloadedError",
    "StepPhases",
    "StepRecord",
    "StepRecording",
    "StructuredOutputsParams",
    "TokenLogprobs",
    "TokenMasks",
]
