"""Intervals, slow consumers, statistics, kinds of output, and the choice of the best completions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llm_helpers.output_bench import DELTA, TOKENIZER, Bench, taken

from llmstack_types import (
    EngineCoreOutput,
    FinishReason,
    RequestOutputKind,
    SamplingParams,
    TokenLogprobs,
)


def test_a_stream_may_wait_for_several_tokens_but_not_for_its_first_and_last():
    bench = Bench()
    stream = bench.add(output_kind=DELTA, stream_interval=3)
    news = []
    for text in "abcdefg":
        bench.say(text)
        news.append(stream.get_nowait())
    bench.say("h", finish_reason=FinishReason.LENGTH)
    texts = [None if one is None else one.outputs[0].text for one in [*news, stream.get_nowait()]]
    assert texts == ["a", None, None, "bcd", None, None, "efg", "h"]


def test_prompt_tokens_wait_until_their_first_token():
    bench = Bench()
    bench.add("a", "four")
    bench.add("b", "twelve")
    assert bench.outputs.num_waiting_prompt_tokens() == 10
    bench.say("x", "a")
    assert bench.outputs.num_waiting_prompt_tokens() == 6
    bench.outputs.abort_requests(["b"])
    assert bench.outputs.num_waiting_prompt_tokens() == 0


def test_what_is_in_flight_is_known_with_its_tokens_and_its_limit():
    bench = Bench()
    bench.add("a", "four", max_tokens=9, ignore_eos=True)
    bench.add("b", "twelve", max_tokens=5, n=2)
    bench.say("xyz", "a")
    whole = [(4, 3, 9, False), (6, 0, 5, True), (0, 0, 5, True)]
    assert bench.outputs.progress(99) == whole
    assert bench.outputs.progress(2) == whole[:2]
    bench.say("x", "a", finish_reason=FinishReason.LENGTH)
    assert bench.outputs.progress(99) == whole[1:]


def test_a_slow_consumer_finds_one_merged_output():
    bench = Bench()
    stream = bench.add(output_kind=DELTA, max_tokens=None)
    for _ in range(100):
        bench.say("ab")
    assert taken(stream).outputs[0].text == "ab" * 100
    assert stream.get_nowait() is None


def test_statistics_name_the_times_that_users_feel():
    bench = Bench()
    bench.add()
    first = bench.say("a", num_cached_tokens=1).iteration_stats
    second = bench.say("b").iteration_stats
    last = bench.say("c", finish_reason=FinishReason.LENGTH).iteration_stats
    assert (first.time_to_first_tokens_s, first.num_prompt_tokens, first.num_cached_tokens) == ([1.0], 2, 1)
    assert (second.inter_token_latencies_s, second.num_generation_tokens) == ([1.0], 1)
    (finished,) = last.finished_requests
    assert (finished.e2e_latency_s, finished.time_to_first_token_s, finished.mean_time_per_output_token_s) == (
        3.0,
        1.0,
        1.0,
    )
    assert (finished.finish_reason, finished.num_prompt_tokens, finished.num_generation_tokens) == ("length", 2, 3)


def test_metrics_of_an_output_name_arrival_first_and_last_token():
    bench = Bench()
    stream = bench.add()
    bench.say("a")
    bench.say("b")
    metrics = taken(stream).metrics
    assert metrics is not None
    assert (metrics.arrival_time_s, metrics.first_token_time_s, metrics.last_token_time_s) == (10.0, 11.0, 12.0)
    assert metrics.num_generation_tokens == 2


@given(
    st.lists(st.lists(st.integers(0, 256), min_size=1, max_size=4), min_size=1, max_size=12),
    st.lists(st.text("abc é", min_size=1, max_size=3), max_size=2),
    st.booleans(),
    st.integers(0, 3),
)
def test_every_kind_of_output_tells_the_same_story(
    steps: list[list[int]], stop: list[str], include: bool, min_tokens: int
):
    stories = set()
    for kind in RequestOutputKind:
        bench = Bench()
        stream = bench.add(
            stop=stop, include_stop_str_in_output=include, min_tokens=min_tokens, output_kind=kind, max_tokens=None
        )
        text, token_ids, reason = "", [], None
        for index, new_token_ids in enumerate(steps):
            is_last = index == len(steps) - 1
            finish_reason = FinishReason.LENGTH if is_last else None
            bench.step(EngineCoreOutput("r", new_token_ids, finish_reason=finish_reason))
            output = stream.get_nowait()
            if output is None:
                continue
            (completion,) = output.outputs
            is_delta = kind is DELTA
            text = text + completion.text if is_delta else completion.text
            token_ids = token_ids + completion.token_ids if is_delta else completion.token_ids
            reason = (completion.finish_reason, completion.stop_reason)
        stories.add((text, tuple(token_ids), reason))
    assert len(stories) == 1
    ((text, shared_ids, shared_reason),) = stories
    assert shared_reason is not None
    if shared_reason[0] == "length":
        assert text == TOKENIZER.decode(shared_ids, skip_special_tokens=True)


# --- best_of ------------------------------------------------------------------------------------------------------


def spoken(request_id: str, tokens: list[int], logprobs: list[float]) -> EngineCoreOutput:
    entries = [TokenLogprobs((token,), (logprob,), 1) for token, logprob in zip(tokens, logprobs, strict=True)]
    return EngineCoreOutput(request_id, tokens, logprobs=entries, finish_reason=FinishReason.LENGTH)


def test_the_completions_with_the_best_mean_logprob_are_returned_best_first():
    bench = Bench()
    collector = bench.add(n=2, best_of=4, temperature=1.0)
    bench.step(spoken("0_r", [1, 2], [-1.0, -1.0]), spoken("1_r", [3], [-0.9]))
    bench.step(spoken("2_r", [4, 5, 6], [-0.2, -0.3, -0.1]))
    assert collector.get_nowait() is None
    bench.step(spoken("3_r", [7, 8, 9, 1], [-0.5] * 4))
    output = taken(collector)
    assert [(one.index, one.token_ids) for one in output.outputs] == [(0, [4, 5, 6]), (1, [7, 8, 9, 1])]
    assert output.outputs[0].cumulative_logprob == pytest.approx(-0.6)
    assert output.outputs[0].logprobs is None, "they were not asked for"
    assert output.num_dropped_tokens == 3
    assert output.finished


def test_of_equally_good_completions_the_first_is_returned():
    bench = Bench()
    collector = bench.add(best_of=2, temperature=1.0, logprobs=1)
    bench.step(spoken("0_r", [1], [-1.0]), spoken("1_r", [2], [-1.0]))
    output = taken(collector)
    assert [one.token_ids for one in output.outputs] == [[1]]
    assert output.outputs[0].logprobs is not None


def test_the_engine_is_asked_for_as_many_logprobs_as_the_choice_takes():
    bench = Bench()
    admitted = bench.inputs.admit("Hi", bench.inputs.check_params(SamplingParams(best_of=3, temperature=1.0)))
    requests = bench.inputs.process_inputs("r", admitted)
    assert [request.request_id for request in requests] == ["0_r", "1_r", "2_r"]
    assert {request.sampling_params.logprobs for request in requests} == {0}
    assert len({request.sampling_params.seed for request in requests}) == 3
    assert {(request.sampling_params.n, request.sampling_params.best_of) for request in requests} == {(1, None)}


def test_the_requests_of_a_beam_search_say_how_many_they_are():
    bench = Bench()
    admitted = bench.inputs.admit("Hi", bench.inputs.check_params(SamplingParams(n=3, use_beam_search=True)))
    requests = bench.inputs.process_inputs("r", admitted)
    assert [request.fork_of for request in requests] == ["", "0_r", "0_r"]
    assert {request.sampling_params.n for request in requests} == {3}
