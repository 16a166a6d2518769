"""Sampling: masks, processors, penalties, seeded draws and log-probabilities."""

from llmstack_model_runner.sampling.bitmask import TokenBitmask, apply_token_bitmask
from llmstack_model_runner.sampling.logits_processor import (
    AddedRow,
    LogitsProcessor,
    LogitsProcessorError,
    LogitsProcessors,
    LogitsProcessorType,
    LogitsRows,
    load_logits_processors,
)
from llmstack_model_runner.sampling.logprobs import LogprobsTensors, gather_logprobs
from llmstack_model_runner.sampling.metadata import RandomRows, SamplingMetadata
from llmstack_model_runner.sampling.processing import GreedyChoice
from llmstack_model_runner.sampling.rows import SamplingRows
from llmstack_model_runner.sampling.sampler import ALL_MASKED, HostTokens, Sampler, SamplerOutput, target_probabilities

__all__ = [
    "ALL_MASKED",
    "AddedRow",
    "GreedyChoice",
    "HostTokens",
    "LogitsProcessor",
    "LogitsProcessorError",
    "LogitsProcessorType",
    "LogitsProcessors",
    "LogitsRows",
    "LogprobsTensors",
    "RandomRows",
    "Sampler",
    "SamplerOutput",
    "SamplingMetadata",
    "SamplingRows",
    "TokenBitmask",
    "apply_token_bitmask",
    "gather_logprobs",
    "load_logits_processors",
    "target_probabilities",
]
