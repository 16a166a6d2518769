"""Chooses tokens from logits: masks, penalties, temperature, min-p, top-k, top-p, seeded draws, log-probabilities."""

from llmstack_model_runner.sampling.logprobs import LogprobsTensors, gather_logprobs
from llmstack_model_runner.sampling.metadata import RandomRows, SamplingMetadata
from llmstack_model_runner.sampling.probabilities import target_probabilities
from llmstack_model_runner.sampling.rows import SamplingRows
from llmstack_model_runner.sampling.sampler import Sampler, SamplerOutput

__all__ = [
    "LogprobsTensors",
    "RandomRows",
    "Sampler",
    "SamplerOutput",
    "SamplingMetadata",
    "SamplingRows",
    "gather_logprobs",
    "target_probabilities",
]
