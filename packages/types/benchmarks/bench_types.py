"""What it costs to make the rows of one step for 256 running requests."""

from __future__ import annotations

from typing import Any

import pytest

from llmstack_types import EngineCoreOutput, EngineCoreRequest, SamplingParams, ScheduledRequest

IDS = [f"cmpl-{index:032x}-0" for index in range(256)]


@pytest.mark.benchmark(group="types")
def test_256_scheduled_requests(benchmark: Any) -> None:
    benchmark(lambda: [ScheduledRequest(request_id, 100, 1, []) for request_id in IDS])


@pytest.mark.benchmark(group="types")
def test_256_outputs(benchmark: Any) -> None:
    benchmark(lambda: [EngineCoreOutput(request_id, [7]) for request_id in IDS])


@pytest.mark.benchmark(group="types")
def test_one_request_with_its_sampling_params(benchmark: Any) -> None:
    benchmark(lambda: EngineCoreRequest("r", [1, 2], SamplingParams(temperature=0.7, seed=1)))
