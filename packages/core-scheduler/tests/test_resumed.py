"""A request that another engine core had begun goes on from the output it carries."""

from __future__ import annotations

from typing import Any

import pytest

from llmstack_core_scheduler import Scheduler, SchedulerConfig
from llmstack_core_scheduler.testing import FakeKVCacheManager
from llmstack_types import (
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
    InvalidRequestError,
    ModelRunnerOutput,
    SamplingParams,
    SchedulerOutput,
)


def make_scheduler(**config: Any) -> Scheduler:
    defaults = {"max_num_seqs": 4, "max_num_batched_tokens": 8, "max_model_len": 64}
    return Scheduler(SchedulerConfig(**{**defaults, **config}), FakeKVCacheManager(32, 4))


def resumed(output: tuple[int, ...] = (7, 8, 9), **params: Any) -> EngineCoreRequest:
    values = {"max_tokens": 5, "logprobs": 0, "prompt_logprobs": 0, **params}
    return EngineCoreRequest("r", [1, 2, 3, 4, 5, 6, 7], SamplingParams(**values), (99,), output_token_ids=output)


def step(scheduler: Scheduler, token_id: int = 50) -> tuple[SchedulerOutput, list[EngineCoreOutput]]:
    scheduled = scheduler.schedule(0.0)
    ends = {request.request_id: len(request.token_ids) for request in scheduled.new_requests}
    tokens = [
        [token_id] if row.num_computed_tokens + row.num_scheduled_tokens >= ends.get(row.request_id, 10) else []
        for row in scheduled.scheduled_requests
    ]
    output = ModelRunnerOutput([row.request_id for row in scheduled.scheduled_requests], tokens)
    return scheduled, scheduler.update_from_output(scheduled, output, 0.0).outputs


def test_its_tokens_are_computed_again_and_only_new_ones_are_sent() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(resumed())
    first, outputs = step(scheduler)
    assert outputs == []
    (new,) = first.new_requests
    assert (new.token_ids, new.num_prompt_tokens) == ([1, 2, 3, 4, 5, 6, 7, 7, 8, 9], 7)
    _, (message,) = step(scheduler)
    assert message.new_token_ids == [50]
    assert message.prompt_logprobs is None
    assert message.num_cached_tokens == -1
    _, (message,) = step(scheduler)
    assert message.finish_reason is FinishReason.LENGTH  # the fifth


def test_min_tokens_counts_what_it_had() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=16)
    scheduler.add_request(resumed(min_tokens=4))
    _, (message,) = step(scheduler, token_id=99)
    assert message.finish_reason is FinishReason.STOP


@pytest.mark.parametrize("output", [(1, 2, 3, 4, 5), (-1,), (2**31,)])
def test_output_that_it_cannot_have_is_refused(output: tuple[int, ...]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        make_scheduler().add_request(resumed(output))
    assert caught.value.param == "output_token_ids"
    assert str(caught.value).startswith("A request of up to 5 tokens cannot go on from ")
