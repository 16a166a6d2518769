"""The engine core over the real scheduler and cache, with the runner that echoes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmstack_engine_core import EngineConfig, EngineCore, SchedulerConfig, build_engine_core
from llmstack_engine_core.adapter_gate import AdapterGate
from llmstack_engine_core.beams import BeamSearches
from llmstack_engine_core.kv_transfer.request_transfers import RequestTransfers
from llmstack_engine_core.stages import AbsentStage, Stage
from llmstack_engine_core.structured_output import ConstrainedRows, GrammarGate
from llmstack_types import (
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
    InvalidRequestError,
    ModelRunnerConfig,
    SamplingParams,
)

LIMITS = {"max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 16}


def build(options: str = "", num_blocks: int = 16, **changes: object) -> EngineCore:
    config = EngineConfig(
        ModelRunnerConfig(f"echo?{options}", block_size=8, **LIMITS),
        runner="echo",
        scheduler=SchedulerConfig(**LIMITS),
        num_blocks=num_blocks,
    )
    return build_engine_core(replace(config, **changes))


def request(request_id: str, num_prompt_tokens: int = 5, max_tokens: int = 4, **params: object) -> EngineCoreRequest:
    prompt = [10 + index for index in range(num_prompt_tokens)]
    return EngineCoreRequest(request_id, prompt, SamplingParams(max_tokens=max_tokens, seed=0, **params))


def run(core: EngineCore, max_steps: int = 1000) -> dict[str, list[EngineCoreOutput]]:
    outputs: dict[str, list[EngineCoreOutput]] = {}
    for _ in range(max_steps):
        if not core.has_unfinished_requests():
            return outputs
        for output in core.step().outputs:
            outputs.setdefault(output.request_id, []).append(output)
    raise AssertionError("no end")


def tokens(outputs: list[EngineCoreOutput]) -> list[int]:
    return [token_id for output in outputs for token_id in output.new_token_ids]


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 20)), min_size=1, max_size=12),
    st.integers(8, 20),
    st.booleans(),
)
def test_every_request_ends_with_its_own_tokens_whatever_runs_beside_it(
    shapes: list[tuple[int, int]], num_blocks: int, has_cache: bool
) -> None:
    core = build(num_blocks=num_blocks, enable_prefix_caching=has_cache)
    for index, (num_prompt_tokens, max_tokens) in enumerate(shapes):
        core.add_request(request(f"r{index}", num_prompt_tokens, max_tokens))
    outputs = run(core)
    for index, (num_prompt_tokens, max_tokens) in enumerate(shapes):
        echo = [10 + place % num_prompt_tokens for place in range(max_tokens)]
        assert tokens(outputs[f"r{index}"]) == echo
        assert outputs[f"r{index}"][-1].finish_reason is FinishReason.LENGTH
    assert core.stats().num_free_blocks == num_blocks


def test_a_request_that_cannot_be_served_ends_alone() -> None:
    core = build()
    core.add_request(request("good"))
    core.add_request(request("long", num_prompt_tokens=65))
    core.add_request(replace(request("unknown"), prompt_token_ids=[50_257]))
    core.add_request(request("bias", logit_bias={50_257: 1.0}))
    outputs = run(core)
    assert tokens(outputs["good"]) == [10, 11, 12, 13]
    for request_id in ("long", "unknown", "bias"):
        (output,) = outputs[request_id]
        assert output.finish_reason is FinishReason.ERROR
        assert output.error
    assert "out of vocabulary" in outputs["unknown"][0].error


def test_a_row_that_fails_ends_alone() -> None:
    core = build("error_request_id=bad")
    core.add_request(request("bad"))
    core.add_request(request("good"))
    outputs = run(core)
    assert outputs["bad"][-1].finish_reason is FinishReason.ERROR
    assert tokens(outputs["good"]) == [10, 11, 12, 13]
    assert core.stats().num_free_blocks == 16


def test_an_id_in_use_is_refused_and_the_first_request_goes_on() -> None:
    core = build()
    core.add_request(request("r"))
    with pytest.raises(InvalidRequestError, match="in use"):
        core.add_request(request("r"))
    assert tokens(run(core)["r"]) == [10, 11, 12, 13]
    core.add_request(request("r"))
    assert tokens(run(core)["r"]) == [10, 11, 12, 13]


def test_an_aborted_request_returns_nothing_and_frees_its_blocks_within_a_step() -> None:
    core = build()
    core.add_request(request("r", max_tokens=50))
    core.add_request(request("refused", num_prompt_tokens=65))
    core.abort_requests(["refused"])
    assert [output.request_id for output in core.step().outputs] == ["r"]
    core.abort_requests(["r", "unknown", "r"])
    assert run(core) == {}
    assert core.stats().num_free_blocks == 16
    core.add_request(request("r"))
    assert tokens(run(core)["r"]) == [10, 11, 12, 13]


def test_requests_above_the_limit_are_refused_until_others_have_ended() -> None:
    core = build(max_num_queued_requests=2)
    for index in range(3):
        core.add_request(request(f"r{index}"))
    outputs = run(core)
    assert [outputs[f"r{index}"][-1].finish_reason for index in range(3)] == ["length", "length", "error"]
    core.add_request(request("r2"))
    assert run(core)["r2"][-1].finish_reason is FinishReason.LENGTH


def test_statistics_come_with_each_step_unless_they_are_off() -> None:
    for is_on in (True, False):
        core = build(log_stats=is_on)
        core.add_request(request("r"))
        assert (core.step().scheduler_stats is not None) is is_on


def test_the_prefix_cache_is_reset_only_while_nothing_runs() -> None:
    core = build()
    core.add_request(request("r"))
    core.step()
    assert not core.reset_prefix_cache()
    run(core)
    assert core.reset_prefix_cache()


def test_logprobs_come_where_they_were_asked_for() -> None:
    core = build()
    core.add_request(request("r", num_prompt_tokens=20, logprobs=2, prompt_logprobs=1))
    core.add_request(request("plain"))
    outputs = run(core)
    for output in outputs["r"]:
        assert len(output.logprobs or []) == len(output.new_token_ids)
    (prompt_logprobs,) = [output.prompt_logprobs for output in outputs["r"] if output.prompt_logprobs is not None]
    assert prompt_logprobs[0] is None
    assert [entry.token_ids[0] for entry in prompt_logprobs[1:]] == [10 + index for index in range(1, 20)]
    assert all(output.logprobs is None and output.prompt_logprobs is None for output in outputs["plain"])


def test_an_exception_in_a_step_is_not_swallowed() -> None:
    core = build("fail_at_step=2")
    core.add_request(request("r"))
    core.step()
    with pytest.raises(RuntimeError, match="step 2"):
        core.step()
    core.shutdown()
    core.shutdown()


def test_an_engine_core_that_sleeps_refuses_requests_and_does_the_same_afterwards() -> None:
    core = build()
    core.add_request(request("before"))
    assert not core.sleep(1)
    before = tokens(run(core)["before"])
    for level in (1, 2, 1):
        assert core.sleep(level)
    assert core.sleep_level == 2
    with pytest.raises(InvalidRequestError, match="asleep"):
        core.add_request(request("asleep"))
    assert not core.has_unfinished_requests()
    core.wake_up()
    core.wake_up()
    assert core.sleep_level == 0
    core.add_request(request("after"))
    outputs = run(core)["after"]
    assert tokens(outputs) == before
    assert outputs[0].num_cached_tokens == 0
    core.shutdown()


def test_an_engine_core_sleeps_as_soon_as_the_last_request_has_ended() -> None:
    core = build(async_scheduling=True)
    core.add_request(request("r", max_tokens=3))
    while not any(output.finish_reason for output in core.step().outputs):
        pass
    assert core.sleep(1)  # although the runner has not been notified of the end yet
    core.shutdown()


def test_a_plain_request_enters_no_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    core = build()
    for stage in (Stage, AbsentStage, AdapterGate, GrammarGate, ConstrainedRows, RequestTransfers, BeamSearches):
        for name, method in vars(stage).items():
            if callable(method) and not name.startswith("__"):
                monkeypatch.setattr(stage, name, lambda *arguments, name=name: pytest.fail(name))
    core.add_request(request("r"))
    core.add_request(request("aborted", max_tokens=50))
    core.step()
    core.abort_requests(["aborted"])
    assert tokens(run(core)["r"]) == [11, 12, 13]


def test_a_refused_request_takes_no_step_of_the_scheduler_and_its_id_is_free_when_it_is_answered() -> None:
    core = build()
    core.add_request(request("r", num_prompt_tokens=65))
    (refused,) = core.step().outputs
    assert refused.finish_reason is FinishReason.ERROR
    assert core.stats().step == 0
    core.add_request(request("r", num_prompt_tokens=65))
    with pytest.raises(InvalidRequestError, match="in use"):  # else the answer would end this one
        core.add_request(request("r"))
    assert [output.finish_reason for output in core.step().outputs] == [FinishReason.ERROR]
    core.add_request(request("r"))
    assert tokens(run(core)["r"]) == [10, 11, 12, 13]


def test_a_refused_request_can_be_aborted_before_it_is_answered() -> None:
    core = build()
    core.add_request(request("r", num_prompt_tokens=65))
    core.abort_requests(["r"])
    core.add_request(request("r"))
    assert tokens(run(core)["r"]) == [10, 11, 12, 13]
