"""The engine core's outputs to streams, without an engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmstack_llm.input_processor import InputProcessor
from llmstack_llm.model.config import ModelConfig
from llmstack_llm.output_processor import OutputProcessor
from llmstack_llm.outputs.collector import RequestOutputCollector
from llmstack_llm.outputs.request_output import RequestOutput
from llmstack_llm.outputs.request_state import CompletionState
from llmstack_llm.testing import byte_tokenizer
from llmstack_llm.text.tokenizer import Tokenizer
from llmstack_types import (
    EngineCoreOutput,
    FinishReason,
    InvalidRequestError,
    NumericalError,
    QuarantinedError,
    RequestFailedError,
    RequestOutputKind,
    SamplingParams,
    TokenLogprobs,
)

TOKENIZER = Tokenizer(byte_tokenizer(), {"eos_token": "<|endoftext|>"})
CONFIG = ModelConfig("m", Path(), "GPT2LMHeadModel", "gpt2", 128, 257, eos_token_ids=(256,))
DELTA, FINAL_ONLY = RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY


class Bench:
    """An output processor, and engine outputs made by hand."""

    def __init__(self) -> None:
        self.outputs = OutputProcessor(TOKENIZER)
        self.inputs = InputProcessor(CONFIG, TOKENIZER, clock=lambda: 10.0)
        self.now_s = 10.0
        self.to_abort: list[str] = []

    def add(
        self, request_id: str = "r", prompt: str = "Hi", is_echo: bool = False, **fields: Any
    ) -> RequestOutputCollector:
        sampling = self.inputs.check_params(SamplingParams(**({"max_tokens": 50} | fields)), is_echo=is_echo)
        admitted = self.inputs.admit(prompt, sampling)
        collector = self.outputs.new_collector(admitted.sampling_params.output_kind)
        self.outputs.add_request(request_id, admitted, self.inputs.process_inputs(request_id, admitted), collector)
        return collector

    def step(self, *outputs: EngineCoreOutput) -> Any:
        self.now_s += 1.0
        processed = self.outputs.process_outputs(outputs, self.now_s)
        self.to_abort += processed.request_ids_to_abort
        return processed

    def say(self, text: str, request_id: str = "r", **fields: Any) -> Any:
        return self.step(EngineCoreOutput(request_id, TOKENIZER.encode(text), **fields))


def taken(collector: RequestOutputCollector) -> RequestOutput:
    output = collector.get_nowait()
    assert output is not None
    return output


def test_cumulative_outputs_hold_everything_so_far():
    bench = Bench()
    stream = bench.add()
    bench.say("a", num_cached_tokens=0)
    assert taken(stream).outputs[0].text == "a"
    bench.say("b")
    output = taken(stream)
    assert (output.outputs[0].text, output.outputs[0].token_ids, output.finished) == (
        "ab",
        TOKENIZER.encode("ab"),
        False,
    )
    assert (output.request_id, output.prompt, output.prompt_token_ids) == ("r", "Hi", TOKENIZER.encode("Hi"))
    bench.say("c", finish_reason=FinishReason.LENGTH)
    output = taken(stream)
    assert (output.outputs[0].finish_reason, output.finished, output.num_cached_tokens) == ("length", True, 0)
    assert bench.outputs.num_unfinished_requests == bench.outputs.num_unfinished_completions == 0


@given(st.lists(st.booleans(), min_size=8, max_size=8))
def test_deltas_add_up_whether_the_consumer_is_slow_or_not(takes: list[bool]):
    bench = Bench()
    stream = bench.add(output_kind=DELTA, logprobs=0)
    text, token_ids, num_logprobs = "", [], 0
    for index, is_taken in enumerate(takes):
        reason = FinishReason.LENGTH if index == len(takes) - 1 else None
        token_id = (
            TOKENIZER.encode("é😀ab"[:4].encode()[index : index + 1].decode("latin-1"))[0] if index > 6 else 70 + index
        )
        bench.step(EngineCoreOutput("r", [token_id], [TokenLogprobs((token_id,), (-1.0,), 1)], finish_reason=reason))
        if is_taken or reason:
            output = stream.get_nowait()
            assert output is not None
            text += output.outputs[0].text
            token_ids += output.outputs[0].token_ids
            num_logprobs += len(output.outputs[0].logprobs or [])
    assert text == TOKENIZER.decode(token_ids)
    assert len(token_ids) == num_logprobs == 8
    assert stream.get_nowait() is None


def test_final_only_returns_one_output_with_all_completions_in_order():
    bench = Bench()
    stream = bench.add(n=2, output_kind=FINAL_ONLY)
    bench.say("bb", "1_r", finish_reason=FinishReason.STOP, stop_reason=67)
    assert stream.get_nowait() is None
    bench.say("aa", "0_r", finish_reason=FinishReason.LENGTH)
    output = taken(stream)
    assert [(one.index, one.text, one.finish_reason) for one in output.outputs] == [
        (0, "aa", "length"),
        (1, "b", "stop"),
    ]
    assert output.outputs[1].stop_reason == 67
    assert output.finished


def test_several_completions_stream_side_by_side_and_end_together():
    bench = Bench()
    stream = bench.add(n=2, output_kind=DELTA)
    processed = bench.step(
        EngineCoreOutput("0_r", [70]), EngineCoreOutput("1_r", [71], finish_reason=FinishReason.LENGTH)
    )
    output = taken(stream)
    assert processed.request_ids == ["r"]
    assert [one.index for one in output.outputs] == [0, 1]
    assert not output.finished
    bench.step(EngineCoreOutput("0_r", [72], finish_reason=FinishReason.LENGTH))
    output = taken(stream)
    assert ([one.index for one in output.outputs], output.finished) == ([0], True)


def test_a_stop_string_ends_the_completion_and_aborts_it_in_the_engine():
    bench = Bench()
    stream = bench.add(stop=["END"], output_kind=DELTA)
    shown = ""
    for char in "some EN":
        bench.say(char)
        shown += taken(stream).outputs[0].text
    assert shown == "some "
    bench.say("Dtail")
    output = taken(stream)
    assert (output.outputs[0].text, output.outputs[0].finish_reason, output.outputs[0].stop_reason) == (
        "",
        "stop",
        "END",
    )
    assert len(output.outputs[0].token_ids) == 1
    assert bench.to_abort == ["r"]
    assert bench.outputs.num_unfinished_requests == 0


def test_a_stop_string_in_the_last_token_needs_no_abort():
    bench = Bench()
    stream = bench.add(stop="b", include_stop_str_in_output=True)
    bench.say("ab", finish_reason=FinishReason.LENGTH)
    output = taken(stream)
    assert (output.outputs[0].text, output.outputs[0].finish_reason, bench.to_abort) == ("ab", "stop", [])


def test_stop_strings_count_only_after_min_tokens():
    bench = Bench()
    stream = bench.add(stop="a", min_tokens=2)
    bench.say("aa")
    assert taken(stream).outputs[0].text == "aa"
    bench.say("ba")
    assert taken(stream).outputs[0].text == "aab"


def test_text_held_back_is_let_out_at_the_end():
    bench = Bench()
    stream = bench.add(stop="END")
    bench.say("x EN", finish_reason=FinishReason.LENGTH)
    assert taken(stream).outputs[0].text == "x EN"


def test_the_token_that_ends_a_completion_is_counted_but_not_shown():
    bench = Bench()
    stream = bench.add(stop_token_ids=[TOKENIZER.encode("!")[0]], skip_special_tokens=False)
    bench.say("ab!", finish_reason=FinishReason.STOP, stop_reason=0)
    output = taken(stream)
    assert (output.outputs[0].text, len(output.outputs[0].token_ids), output.outputs[0].stop_reason) == ("ab", 3, 0)


def test_without_detokenization_there_are_ids_only():
    bench = Bench()
    stream = bench.add(detokenize=False)
    bench.say("ab")
    output = taken(stream)
    assert (output.outputs[0].text, len(output.outputs[0].token_ids)) == ("", 2)


def test_logprobs_are_keyed_by_token_and_add_up():
    bench = Bench()
    stream = bench.add(logprobs=2, prompt_logprobs=1)
    entries = [TokenLogprobs((70, 71, 70), (-1.5, -0.5, -1.5), 2), TokenLogprobs((72, 73), (-float("inf"), -0.1), 9)]
    prompt = [None, TokenLogprobs((75, 70), (-2.0, -1.0), 3)]
    bench.step(EngineCoreOutput("r", [70, 72], entries, prompt))
    output = taken(stream)
    completion = output.outputs[0]
    assert completion.logprobs is not None
    assert list(completion.logprobs[0]) == [70, 71]
    assert [(one.rank, one.logprob) for one in completion.logprobs[0].values()] == [(2, -1.5), (1, -0.5)]
    assert completion.logprobs[0][70].decoded_token == TOKENIZER.decode([70])
    assert completion.logprobs[1][72].logprob == -9999.0
    assert completion.cumulative_logprob == -1.5 - 9999.0
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert set(output.prompt_logprobs[1] or {}) == {75, 70}


def test_a_request_for_no_output_ends_with_nothing_but_its_prompt():
    bench = Bench()
    stream = bench.add(max_tokens=0, prompt_logprobs=0, is_echo=True)
    entries = [None, TokenLogprobs((1,), (-1.0,), 1)]
    bench.step(EngineCoreOutput("r", [70], prompt_logprobs=entries, finish_reason=FinishReason.LENGTH))
    output = taken(stream)
    assert (output.outputs[0].text, output.outputs[0].token_ids, output.outputs[0].finish_reason) == ("", [], "length")
    assert output.prompt_logprobs is not None


def test_a_second_request_under_the_same_id_is_refused_and_the_first_unharmed():
    bench = Bench()
    stream = bench.add()
    with pytest.raises(InvalidRequestError) as caught:
        bench.add()
    assert caught.value.param == "request_id"
    with pytest.raises(InvalidRequestError):
        bench.add("x", n=2) and bench.add("0_x")
    bench.say("a")
    assert taken(stream).outputs[0].text == "a"


def test_aborting_ends_all_completions_and_their_stream():
    bench = Bench()
    stream = bench.add(n=2)
    bench.say("a", "0_r")
    assert bench.outputs.abort_requests(["r", "unknown"]) == ["0_r", "1_r"]
    output = taken(stream)
    assert [(one.text, one.finish_reason) for one in output.outputs] == [("a", "abort"), ("", "abort")]
    assert output.finished
    bench.say("late", "0_r")
    assert stream.get_nowait() is None


def test_a_failure_in_the_engine_ends_that_request_alone():
    bench = Bench()
    bad, good = bench.add("bad", n=2), bench.add("good")
    bench.step(
        EngineCoreOutput("0_bad", [], finish_reason=FinishReason.ERROR, error="numerical"),
        EngineCoreOutput("good", [70]),
    )
    with pytest.raises(RequestFailedError, match="numerical"):
        bad.get_nowait()
    assert taken(good).outputs[0].token_ids == [70]
    assert bench.to_abort == ["0_bad", "1_bad"]
    assert list(bench.outputs.request_id_to_state) == ["good"]


def test_a_failure_of_the_numbers_says_so():
    bench = Bench()
    bad = bench.add("bad")
    bench.step(EngineCoreOutput("bad", [], finish_reason=FinishReason.ERROR, error=NumericalError.TEXT))
    with pytest.raises(NumericalError, match="no usable probabilities"):
        bad.get_nowait()


@pytest.mark.parametrize("text", QuarantinedError.TEXTS)
def test_a_request_that_cannot_be_computed_says_why(text: str):
    bench = Bench()
    bad = bench.add("bad")
    bench.step(EngineCoreOutput("bad", [], finish_reason=FinishReason.ERROR, error=text))
    with pytest.raises(QuarantinedError, match=text):
        bad.get_nowait()


def test_a_bug_with_one_request_ends_that_request_alone():
    bench = Bench()
    bad, good = bench.add("bad"), bench.add("good")
    bench.step(EngineCoreOutput("bad", ["x"]), EngineCoreOutput("good", [70]))  # type: ignore[list-item]
    with pytest.raises(RequestFailedError):
        bad.get_nowait()
    assert taken(good).outputs[0].token_ids == [70]


def test_a_detokenizer_that_fails_ends_its_request_alone(monkeypatch: pytest.MonkeyPatch):
    def story(bad_ids: list[int]) -> tuple[list[RequestOutput], RequestOutputCollector, Bench]:
        bench = Bench()
        bad, good = bench.add("bad"), bench.add("good")
        outputs = []
        for index, token_id in enumerate(bad_ids):
            bench.step(EngineCoreOutput("bad", [token_id]), EngineCoreOutput("good", [70 + index]))
            outputs.append(taken(good))
        return outputs, bad, bench

    expected, _, _ = story([91, 92, 93])
    append_all = CompletionState.append_all

    def fail_at_92(self: CompletionState, output: EngineCoreOutput) -> bool:
        if 92 in output.new_token_ids:
            raise UnicodeError("a bug of the tokenizer")
        return append_all(self, output)

    monkeypatch.setattr(CompletionState, "append_all", fail_at_92)
    outputs, bad, bench = story([91, 92, 93])
    assert [output.outputs for output in outputs[:1]] == [output.outputs for output in expected[:1]]
    assert [output.outputs[0].text for output in outputs] == [output.outputs[0].text for output in expected]
    assert taken(bad).outputs[0].token_ids == [91]
    with pytest.raises(RequestFailedError):
        bad.get_nowait()
    assert bench.to_abort == ["bad"]


def test_an_error_comes_after_what_was_already_there():
    bench = Bench()
    stream = bench.add()
    bench.say("a")
    bench.outputs.fail_all(RequestFailedError("gone"))
    assert taken(stream).outputs[0].text == "a"
    for _ in range(2):
        with pytest.raises(RequestFailedError):
            stream.get_nowait()


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
