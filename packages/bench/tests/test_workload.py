"""Random workloads, presets and arrivals."""

from __future__ import annotations

import argparse
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmstack_bench.arrivals import arrival_times, planned_arrivals
from llmstack_bench.commands.serve import ServeBench, with_defaults
from llmstack_bench.datasets import request_maker
from llmstack_bench.errors import BenchError
from llmstack_bench.presets import PRESETS
from llmstack_bench.workload import BenchRequest, RandomWorkload


def options(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    ServeBench().add_arguments(parser)
    return with_defaults(parser.parse_args(arguments))


def test_prompts_have_their_lengths_and_their_own_tokens():
    requests = RandomWorkload(20, 64, 5, vocab_size=1000).requests()
    assert [len(request.prompt) for request in requests] == [64] * 20
    assert {request.num_output_tokens for request in requests} == {5}
    assert len({tuple(request.prompt) for request in requests}) == 20
    assert all(3 <= token_id < 1000 for request in requests for token_id in request.prompt)


def test_prompts_share_prefixes_in_turns_and_nothing_else():
    prompts = [
        r.prompt for r in RandomWorkload(6, 8, 1, num_prefix_tokens=16, num_prefixes=2, vocab_size=9999).requests()
    ]
    assert [len(prompt) for prompt in prompts] == [24] * 6
    assert len({tuple(prompt[:16]) for prompt in prompts}) == 2
    assert prompts[0][:16] == prompts[2][:16] != prompts[1][:16]
    assert len({tuple(prompt[16:]) for prompt in prompts}) == 6


def test_equal_seeds_make_equal_requests_and_others_do_not():
    workload = RandomWorkload(3, 9, 2, range_ratio=0.5, seed=4)
    assert workload.requests() == workload.requests()
    assert workload.requests() != replace(workload, seed=5).requests()


def test_lengths_vary_within_their_ratio():
    lengths = {len(r.prompt) for r in RandomWorkload(300, 100, 2, range_ratio=0.2).requests()}
    assert min(lengths) >= 80
    assert max(lengths) <= 120
    assert len(lengths) > 20


@pytest.mark.parametrize(
    "wrong", [{"range_ratio": 1.0}, {"vocab_size": 3}, {"num_input_tokens": 0}, {"num_prompts": 10**7}]
)
def test_a_workload_that_cannot_be_made_is_an_error(wrong: dict[str, float]):
    with pytest.raises(BenchError, match="--"):
        replace(RandomWorkload(4, 50, 5), **wrong).requests()


@pytest.mark.parametrize(
    ("name", "num_input", "num_output", "concurrency", "num_shared"),
    [("w1", 32, 128, 1, 0), ("w2", 900, 1, 1, 0), ("w3-c8", 128, 128, 8, 0), ("w3-c32", 128, 128, 32, 0),
     ("w4", 544, 32, 16, 512)],
)  # fmt: skip
def test_presets_send_what_they_say(name: str, num_input: int, num_output: int, concurrency: int, num_shared: int):
    named = options("--preset", name)
    requests = request_maker(named, 50257, is_chat=False)(0)
    assert named.max_concurrency == concurrency
    assert {len(request.prompt) for request in requests} == {num_input}
    assert {request.num_output_tokens for request in requests} == {num_output}
    assert len({tuple(request.prompt[:num_shared]) for request in requests}) == 1
    assert len({tuple(request.prompt) for request in requests}) == len(requests)
    assert len(requests) == (64 if name in ("w3-c8", "w3-c32", "w4") else PRESETS[name].flags["num_prompts"])
    assert named.ignore_eos is True


def test_the_command_line_wins_over_a_preset_and_a_preset_over_the_defaults():
    named = options("--preset", "w2", "--random-input-len", "512", "--no-ignore-eos")
    assert (named.random_input_len, named.random_output_len, named.ignore_eos) == (512, 1, False)
    assert options().num_prompts == 100


def test_vllms_names_of_datasets_are_understood():
    assert options("--dataset-name", "prefix_repetition").dataset_name == "shared-prefix"
    assert options("--dataset-name", "jsonl").dataset_name == "custom"


@given(st.integers(2, 200), st.floats(0.1, 1000), st.sampled_from([0.2, 1.0, 5.0, math.inf]), st.integers(0, 9))
def test_arrivals_start_at_zero_grow_and_keep_the_rate(num: int, rate: float, burstiness: float, seed: int):
    times = arrival_times(num, rate, burstiness, seed)
    assert len(times) == num
    assert times[0] == 0
    assert times == sorted(times)
    assert times[-1] == pytest.approx((num - 1) / rate)


def test_an_infinite_rate_sends_all_at_once_and_infinite_burstiness_is_even():
    assert arrival_times(3) == [0, 0, 0]
    assert arrival_times(4, 2.0, math.inf) == pytest.approx([0, 0.5, 1, 1.5])
    assert arrival_times(0) == []


@pytest.mark.parametrize(("rate", "burstiness"), [(0, 1), (-1, 1), (math.nan, 1), (1, 0), (1, math.nan)])
def test_a_rate_that_is_none_is_an_error(rate: float, burstiness: float):
    with pytest.raises(BenchError, match=r"--(request-rate|burstiness)"):
        arrival_times(3, rate, burstiness)


def test_planned_arrivals_hold_only_where_every_request_has_one():
    timed, untimed = BenchRequest([4], 1, 0.5), BenchRequest([4], 1)
    assert planned_arrivals([timed, timed]) == [0.5, 0.5]
    assert planned_arrivals([timed, untimed]) is None
    assert planned_arrivals([]) is None
