"""The engine core's outputs to streams, without an engine."""

from __future__ import annotations

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from llm_helpers.output_bench import DELTA, FINAL_ONLY, TOKENIZER, Bench, taken
from tokenizers import decoders, models

from llmstack_llm.output_processor import OutputProcessor
from llmstack_llm.outputs.collector import RequestOutputCollector
from llmstack_llm.outputs.request_output import RequestOutput
from llmstack_llm.outputs.request_state import CompletionState, logprobs_dict
from llmstack_llm.text.tokenizer import Tokenizer
from llmstack_types import (
    EngineCoreOutput,
    FinishReason,
    InvalidRequestError,
    NoTokenAllowedError,
    NumericalError,
    QuarantinedError,
    RequestFailedError,
    TokenLogprobs,
)


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


@pytest.mark.parametrize(("skips", "has_spaces", "text"), [
    (False, True, "hello <a> <b> hello <b>"), (False, False, "hello <a><b> hello <b>"), (True, False, "hello hello"),
])  # fmt: skip
def test_added_tokens_follow_each_other_without_a_space_where_that_is_asked_for(
    skips: bool, has_spaces: bool, text: str
):
    backend = tokenizers.Tokenizer(models.WordLevel({"<unk>": 0, "hello": 1}, unk_token="<unk>"))
    backend.decoder = decoders.WordPiece(cleanup=False)
    backend.add_special_tokens(["<a>", "<b>"])
    bench = Bench()
    bench.outputs = OutputProcessor(Tokenizer(backend))
    stream = bench.add(skip_special_tokens=skips, spaces_between_special_tokens=has_spaces)
    bench.step(EngineCoreOutput("r", [1, 2, 3, 1, 3], finish_reason=FinishReason.LENGTH))
    assert taken(stream).outputs[0].text == text


def test_without_detokenization_there_are_ids_only():
    bench = Bench()
    stream = bench.add(detokenize=False)
    bench.say("ab")
    output = taken(stream)
    assert (output.outputs[0].text, len(output.outputs[0].token_ids)) == ("", 2)


def test_a_token_that_is_a_part_of_a_character_carries_its_bytes():
    first, second = TOKENIZER.encode("é")
    found = logprobs_dict(TokenLogprobs((first, second), (-0.5, -1.5), 1), TOKENIZER)
    assert [one.decoded_token for one in found.values()] == ["\ufffd"] * 2
    assert [one.token_bytes for one in found.values()] == [b"\xc3", b"\xa9"]


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
    assert completion.logprobs[0][70].token_bytes is None
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
    output = EngineCoreOutput("bad", [], finish_reason=FinishReason.ERROR, error=NumericalError.TEXT)
    assert bench.step(output).iteration_stats.num_corrupted == 1
    with pytest.raises(NumericalError, match="no usable probabilities"):
        bad.get_nowait()


@pytest.mark.parametrize("text", [NoTokenAllowedError.TEXT, QuarantinedError.NOT_CONSTRAINABLE])
def test_a_request_that_leaves_no_token_does_not_count_as_corrupted(text: str):
    bench = Bench()
    bad = bench.add("bad")
    bench.step(EngineCoreOutput("bad", [70]))
    assert taken(bad).outputs[0].token_ids == [70]
    processed = bench.step(EngineCoreOutput("bad", [], finish_reason=FinishReason.ERROR, error=text))
    assert processed.iteration_stats.num_corrupted == 0
    with pytest.raises(RequestFailedError, match=text):
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
