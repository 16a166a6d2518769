"""The steps that a start computes before the first request."""

from __future__ import annotations

import pytest

from llmstack_model_runner.steps.warm_up import pooling_warm_up_steps, warm_up_steps


@pytest.mark.parametrize(("device_type", "num_tokens"), [("cpu", 4), ("cuda", 64)])
def test_prompts_are_short_where_nothing_is_compiled(device_type: str, num_tokens: int) -> None:
    prefill, *decodes, last = warm_up_steps(100, 16, 2048, 8, device_type)
    assert [len(request.token_ids) for request in prefill.new_requests] == [num_tokens] * 2
    assert [step.total_num_scheduled_tokens for step in decodes] == [2, 2]
    assert last.removed_request_ids == [request.request_id for request in prefill.new_requests]
    pooled, _ = pooling_warm_up_steps(100, 16, 2048, device_type)
    assert pooled.total_num_scheduled_tokens == num_tokens


@pytest.mark.parametrize(
    ("sizes", "num_rows", "num_tokens"),
    [((100, 16, 10, 8), 2, 3), ((100, 16, 2048, 1), 1, 4), ((1, 4, 2048, 8), 1, 2), ((1, 2, 2048, 8), 0, 0)],
)
def test_prompts_fit_the_storage_and_the_step(sizes: tuple[int, int, int, int], num_rows: int, num_tokens: int) -> None:
    steps = list(warm_up_steps(*sizes, "cpu"))
    found = [len(request.token_ids) for step in steps for request in step.new_requests]
    assert found == [num_tokens] * num_rows
