"""Swaps, forks and scheduling ahead over a real model: no token differs from that of a roomy, plain engine."""

import pytest

from llmstack_engine_core import EngineConfig, SchedulerConfig, build_engine_core
from llmstack_types import EngineCoreRequest, ModelRunnerConfig, SamplingParams

testing = pytest.importorskip("llmstack_model_runner.testing")

LIMITS = {"max_model_len": 64, "max_num_seqs": 6, "max_num_batched_tokens": 48}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return str(testing.write_gpt2_checkpoint(tmp_path_factory.mktemp("gpt2"), seed=5))


def build(model_path, num_blocks=64, **changes):
    model = ModelRunnerConfig(model_path, block_size=4, device="cpu", **LIMITS)
    return build_engine_core(EngineConfig(model, scheduler=SchedulerConfig(**LIMITS), num_blocks=num_blocks, **changes))


def requests():
    for number in range(3):
        prompt = [(7 * number + 3 * position) % 97 for position in range(6 + 3 * number)]
        for index in range(2):
            name = f"{index}_{number}"
            params = SamplingParams(temperature=0.8 * index, seed=number, max_tokens=24, ignore_eos=True)
            yield EngineCoreRequest(name, prompt, params, fork_of=f"0_{number}" if index else "")


def run(core):
    answers = {}
    for request in requests():
        core.add_request(request)
    while core.has_unfinished_requests():
        for output in core.step().outputs:
            assert output.error is None
            answers.setdefault(output.request_id, []).extend(output.new_token_ids)
    stats = core.stats()
    core.shutdown()
    return answers, stats


@pytest.fixture(scope="module")
def plain(model_path):
    answers, stats = run(build(model_path, enable_prefix_caching=False))
    assert stats.num_preemptions == 0
    assert stats.num_forks == 3
    return answers


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("num_host_blocks", [0, 64])
def test_no_token_depends_on_how_requests_give_way(model_path, plain, num_host_blocks, async_scheduling):
    answers, stats = run(build(model_path, 18, num_host_blocks=num_host_blocks, async_scheduling=async_scheduling))
    assert answers == plain
    assert stats.num_preemptions > 0
    if not num_host_blocks:
        assert stats.num_swap_preemptions == 0


def test_requests_that_are_swapped_out_and_in_say_what_they_would_have_said(model_path, plain, monkeypatch):
    from llmstack_core_scheduler import CheapestPreemption

    monkeypatch.setattr(CheapestPreemption, "prefers_swap", lambda self, num_tokens, num_blocks: True)
    answers, stats = run(build(model_path, 18, num_host_blocks=64))
    assert answers == plain
    assert min(stats.num_swapped_out_blocks, stats.num_swapped_in_blocks) > 0
    assert stats.num_free_host_blocks == 64
