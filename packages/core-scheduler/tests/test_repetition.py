"""The end of a request that repeats itself."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmstack_core_scheduler import Scheduler, SchedulerConfig
from llmstack_core_scheduler.repetition import RepetitionDetector
from llmstack_core_scheduler.testing import FakeKVCacheManager
from llmstack_types import (
    EngineCoreRequest,
    FinishReason,
    ModelRunnerOutput,
    RepetitionDetectionParams,
    SamplingParams,
)


def is_repeated(output: list[int], params: RepetitionDetectionParams) -> bool:
    """The definition: the last tokens are one pattern, `min_count` times."""
    for length in range(max(params.min_pattern_size, 1), params.max_pattern_size + 1):
        tail = output[-length * params.min_count :]
        parts = [tail[start : start + length] for start in range(0, len(tail), length)]
        if len(tail) == length * params.min_count and all(one == other for one, other in pairwise(parts)):
            return True
    return False


@given(
    st.lists(st.integers(0, 1), max_size=24), st.integers(0, 5), st.integers(0, 4), st.integers(2, 4),
    st.lists(st.integers(0, 1), max_size=3), st.integers(1, 4),
)  # fmt: skip
def test_a_repetition_is_found_as_it_is_defined(
    output: list[int], longest: int, shortest: int, count: int, prompt: list[int], per_step: int
):
    params = RepetitionDetectionParams(longest, shortest, count)
    detector = RepetitionDetector(params, len(prompt))
    for end in range(0, len(output) + 1, per_step):
        assert detector.is_repeating(prompt + output[:end]) == is_repeated(output[:end], params)


@pytest.mark.parametrize(
    ("params", "num_tokens", "reason"),
    [
        ({"repetition_detection": RepetitionDetectionParams(2, 0, 3)}, 6, FinishReason.REPETITION),
        ({"repetition_detection": RepetitionDetectionParams(2, 0, 3), "min_tokens": 7}, 7, FinishReason.REPETITION),
        ({"repetition_detection": RepetitionDetectionParams(1, 0, 2)}, 9, FinishReason.LENGTH),
        ({}, 9, FinishReason.LENGTH),
    ],
    ids=str,
)
def test_a_request_that_repeats_itself_ends(params: dict[str, object], num_tokens: int, reason: FinishReason):
    config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=512)
    scheduler = Scheduler(config, FakeKVCacheManager(100, 16))
    scheduler.add_request(EngineCoreRequest("a", [20, 21, 20, 21], SamplingParams(max_tokens=9, **params)))
    for number in range(1, num_tokens + 1):
        output = ModelRunnerOutput(["a"], [[20 + number % 2]])
        (message,) = scheduler.update_from_output(scheduler.schedule(0.0), output, 0.0).outputs
        assert message.finish_reason is (reason if number == num_tokens else None)
    assert not scheduler.schedule(0.0).scheduled_requests
