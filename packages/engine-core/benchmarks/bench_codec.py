"""What a message costs: the figures of vLLM 0.32 on the machine they were taken on are 2.9/19.2 and 19.1/39.1 µs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgpack
import pytest

from llmstack_core_scheduler.admission import _are_token_ids
from llmstack_engine_core.admission import check_request
from llmstack_engine_core.messages.protocol import CLIENT_MESSAGES, ENGINE_MESSAGES
from llmstack_engine_core.messages.steps import STEP
from llmstack_types import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineReady,
    SamplingParams,
    ScheduledRequest,
    SchedulerOutput,
    SchedulerStats,
)

REQUEST = EngineCoreRequest(
    "cmpl-0123456789abcdef0123456789abcdef-0",
    [(37 * index) % 50_257 for index in range(1024)],
    SamplingParams(temperature=0.7, seed=1, max_tokens=128),
    eos_token_ids=(50_256,),
)


def outputs(num_rows: int) -> EngineCoreOutputs:
    rows = [EngineCoreOutput(f"cmpl-{index:032x}-0", [index * 31]) for index in range(num_rows)]
    return EngineCoreOutputs(rows, 1.5, SchedulerStats(1, num_rows))


def step(num_rows: int) -> SchedulerOutput:
    rows = [ScheduledRequest(f"cmpl-{index:032x}-0", 100 + index, 1, [], []) for index in range(num_rows)]
    return SchedulerOutput(7, [], rows, [], num_rows)


def report(benchmark: Any, peer_us: float) -> None:
    if benchmark.stats is not None:
        benchmark.extra_info["ratio_to_vllm"] = round(benchmark.stats.stats.median * 1e6 / peer_us, 2)


@pytest.mark.benchmark(group="codec")
def test_encode_a_request_of_1024_tokens(benchmark: Any) -> None:
    benchmark(CLIENT_MESSAGES.encode, REQUEST)
    report(benchmark, 2.9)


@pytest.mark.benchmark(group="codec")
def test_decode_a_request_of_1024_tokens(benchmark: Any) -> None:
    assert benchmark(CLIENT_MESSAGES.decode, CLIENT_MESSAGES.encode(REQUEST))[1] == REQUEST
    report(benchmark, 19.2)


@pytest.mark.benchmark(group="long prompts")
def test_decode_and_check_a_request_of_524288_tokens(benchmark: Any) -> None:
    frame = CLIENT_MESSAGES.encode(replace(REQUEST, prompt_token_ids=REQUEST.prompt_token_ids * 512))
    ready = EngineReady(65_536, 16, 2**20, 50_257, "float32", "cpu", is_generative=True)

    def arrive() -> None:
        request = CLIENT_MESSAGES.decode(frame)[1]
        assert isinstance(request, EngineCoreRequest)
        check_request(request, ready)
        assert _are_token_ids(request.prompt_token_ids)

    benchmark(arrive)


@pytest.mark.benchmark(group="codec")
def test_encode_256_outputs(benchmark: Any) -> None:
    benchmark(ENGINE_MESSAGES.encode, outputs(256))
    report(benchmark, 19.1)


@pytest.mark.benchmark(group="codec")
def test_decode_256_outputs(benchmark: Any) -> None:
    assert benchmark(ENGINE_MESSAGES.decode, ENGINE_MESSAGES.encode(outputs(256)))[1] == outputs(256)
    report(benchmark, 39.1)


@pytest.mark.benchmark(group="there and back")
@pytest.mark.parametrize("num_rows", [1, 8, 64, 256])
def test_outputs_there_and_back(benchmark: Any, num_rows: int) -> None:
    sent = outputs(num_rows)
    assert benchmark(lambda: ENGINE_MESSAGES.decode(ENGINE_MESSAGES.encode(sent)))[1] == sent


@pytest.mark.benchmark(group="there and back")
@pytest.mark.parametrize("num_rows", [1, 8, 64, 256])
def test_a_step_for_ranks_there_and_back(benchmark: Any, num_rows: int) -> None:
    sent, pack = step(num_rows), msgpack.Packer(autoreset=True).pack
    assert benchmark(lambda: STEP.unpack(msgpack.unpackb(pack(STEP.pack(sent, "step"))), "step")) == sent
