"""What a message costs: the figures of vLLM 0.32 on the machine they were taken on are 2.9/19.2 and 19.1/39.1 µs."""

from __future__ import annotations

from typing import Any

import pytest

from llmstack_engine_core.ipc.codec import decode_client_message, decode_engine_message, encode
from llmstack_types import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, SamplingParams, SchedulerStats

REQUEST = EngineCoreRequest(
    "cmpl-0123456789abcdef0123456789abcdef-0",
    [(37 * index) % 50_257 for index in range(1024)],
    SamplingParams(temperature=0.7, seed=1, max_tokens=128),
    eos_token_ids=(50_256,),
)
OUTPUTS = EngineCoreOutputs(
    [EngineCoreOutput(f"cmpl-{index:032x}-0", [index * 31]) for index in range(256)], 1.5, SchedulerStats(1, 256)
)


def report(benchmark: Any, peer_us: float) -> None:
    if benchmark.stats is not None:
        benchmark.extra_info["ratio_to_vllm"] = round(benchmark.stats.stats.median * 1e6 / peer_us, 2)


@pytest.mark.benchmark(group="codec")
def test_encode_a_request_of_1024_tokens(benchmark: Any) -> None:
    benchmark(encode, REQUEST)
    report(benchmark, 2.9)


@pytest.mark.benchmark(group="codec")
def test_decode_a_request_of_1024_tokens(benchmark: Any) -> None:
    assert benchmark(decode_client_message, encode(REQUEST)) == REQUEST
    report(benchmark, 19.2)


@pytest.mark.benchmark(group="codec")
def test_encode_256_outputs(benchmark: Any) -> None:
    benchmark(encode, OUTPUTS)
    report(benchmark, 19.1)


@pytest.mark.benchmark(group="codec")
def test_decode_256_outputs(benchmark: Any) -> None:
    assert benchmark(decode_engine_message, encode(OUTPUTS)) == OUTPUTS
    report(benchmark, 39.1)
