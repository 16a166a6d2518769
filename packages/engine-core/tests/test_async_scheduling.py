"""Scheduling ahead changes no output, and a failing row does not affect the others."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmstack_engine_core import EngineConfig, EngineCore, SchedulerConfig, build_engine_core
from llmstack_types import EngineCoreRequest, FinishReason, ModelRunnerConfig, SamplingParams

LIMITS = {"max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 16}


def build(options: str = "", num_blocks: int = 16, **changes: object) -> EngineCore:
    model = ModelRunnerConfig(f"echo?{options}", block_size=8, **LIMITS)
    scheduler = SchedulerConfig(**LIMITS)
    return build_engine_core(
        EngineConfig(model, runner="echo", scheduler=scheduler, num_blocks=num_blocks, **changes)  # type: ignore[arg-type]
    )


def request(request_id: str, num_prompt_tokens: int, max_tokens: int, **params: object) -> EngineCoreRequest:
    prompt = [10 + index for index in range(num_prompt_tokens)]
    return EngineCoreRequest(request_id, prompt, SamplingParams(max_tokens=max_tokens, seed=0, **params))  # type: ignore[arg-type]


def run(core: EngineCore, requests: list[EngineCoreRequest]) -> dict[str, list[object]]:
    results: dict[str, list[object]] = {entry.request_id: [] for entry in requests}
    for entry in requests:
        core.add_request(entry)
    while core.has_unfinished_requests():
        for output in core.step().outputs:
            results[output.request_id].append((output.new_token_ids, output.finish_reason, output.logprobs))
    core.shutdown()
    return results


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 20)), min_size=1, max_size=8),
    st.integers(8, 20),
    st.integers(0, 8),
)
def test_outputs_are_those_of_a_core_that_waits(
    shapes: list[tuple[int, int]], num_blocks: int, num_host_blocks: int
) -> None:
    def requests() -> list[EngineCoreRequest]:
        return [
            request(f"{number}", length, max_tokens, logprobs=1, stop_token_ids=(30,))
            for number, (length, max_tokens) in enumerate(shapes)
        ]

    waiting = run(build(num_blocks=num_blocks), requests())
    ahead = run(build(num_blocks=num_blocks, async_scheduling=True, num_host_blocks=num_host_blocks), requests())
    assert ahead == waiting


def test_outputs_come_with_the_step_after_and_the_last_ones_are_not_forgotten() -> None:
    core = build(async_scheduling=True)
    core.add_request(request("a", 4, 2))
    assert core.step().outputs == []
    assert core.step().outputs[0].new_token_ids == [10]
    assert core.has_unfinished_requests()
    assert core.step().outputs[0].finish_reason is FinishReason.LENGTH
    core.step()
    assert not core.has_unfinished_requests()


def test_a_row_that_fails_while_its_next_is_scheduled_fails_alone() -> None:
    results = run(build("error_request_id=bad", async_scheduling=True), [request("bad", 4, 5), request("good", 4, 3)])
    assert [entry[1] for entry in results["bad"]] == [FinishReason.ERROR]  # type: ignore[index]
    assert len(results["good"]) == 3


def test_an_abort_between_two_steps_drops_what_is_under_way() -> None:
    core = build(async_scheduling=True)
    core.add_request(request("a", 4, 9))
    core.step()
    core.abort_requests(["a"])
    core.add_request(request("a", 2, 1))
    results = [output for _ in range(4) for output in core.step().outputs]
    assert [(output.new_token_ids, output.finish_reason) for output in results] == [([10], FinishReason.LENGTH)]
    assert not core.has_unfinished_requests()


@pytest.mark.parametrize("name", ["num_host_blocks", "step_log_bytes"])
def test_a_negative_size_is_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        build(**{name: -1})  # type: ignore[arg-type]
