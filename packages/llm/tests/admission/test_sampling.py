"""Validation: every field's type and range, the wording, and the normal forms."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmstack_llm.admission.limits import AdmissionLimits, check_fan_out, check_prompt_chars
from llmstack_llm.admission.rules import check_token_ids
from llmstack_llm.admission.sampling import check_sampling, given_fields
from llmstack_llm.input_processor import InputProcessor
from llmstack_llm.model.config import ModelConfig
from llmstack_llm.requests import AdmittedRequest
from llmstack_types import InvalidRequestError, SamplingParams, ThinkingTags

LIMITS = AdmissionLimits(max_model_len=100, vocab_size=1000)
MODEL = ModelConfig("m", Path(), "GPT2LMHeadModel", "gpt2", max_model_len=100, vocab_size=1000)


def checked(
    params: SamplingParams, limits: AdmissionLimits = LIMITS, names: Mapping[str, str] | None = None
) -> SamplingParams:
    return SamplingParams(**check_sampling(given_fields(params), limits, names or {}).values)


def admit(
    token_ids: Any, params: SamplingParams, limits: AdmissionLimits = LIMITS, *, is_echo: bool = False, **options: Any
) -> AdmittedRequest:
    processor = InputProcessor(MODEL, None)
    processor.limits = limits
    return processor.admit(token_ids, processor.check_params(params, is_echo=is_echo), **options)


def refusal(limits: AdmissionLimits = LIMITS, **fields: Any) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        checked(SamplingParams(**fields), limits)
    return caught.value


TABLE = [
    ("n", 0, "integer_below_min_value"),
    ("n", 129, "integer_above_max_value"),
    ("n", True, "invalid_type"),
    ("n", 1.0, "invalid_type"),
    ("n", 10**30, "integer_above_max_value"),
    ("n", None, "invalid_type"),
    ("temperature", -0.1, "decimal_below_min_value"),
    ("temperature", 2.1, "decimal_above_max_value"),
    ("temperature", "1", "invalid_type"),
    ("temperature", True, "invalid_type"),
    ("temperature", math.nan, "invalid_value"),
    ("temperature", math.inf, "decimal_above_max_value"),
    ("temperature", 10**400, "decimal_above_max_value"),
    ("top_p", 0.0, "decimal_below_min_value"),
    ("top_p", 1.01, "decimal_above_max_value"),
    ("top_p", math.nan, "invalid_value"),
    ("top_k", -2, "integer_below_min_value"),
    ("top_k", 1.5, "invalid_type"),
    ("top_k", 2**63, "integer_above_max_value"),
    ("min_p", -0.1, "decimal_below_min_value"),
    ("min_p", 1.1, "decimal_above_max_value"),
    ("typical_p", 0.0, "decimal_below_min_value"),
    ("typical_p", 1.5, "decimal_above_max_value"),
    ("top_n_sigma", -2, "decimal_below_min_value"),
    ("top_n_sigma", 1000.5, "decimal_above_max_value"),
    ("no_repeat_ngram_size", -1, "integer_below_min_value"),
    ("no_repeat_ngram_size", 1025, "integer_above_max_value"),
    ("no_repeat_ngram_size", 2.5, "invalid_type"),
    ("bad_words", "word", "invalid_type"),
    ("bad_words", ["a", 5], "invalid_type"),
    ("bad_words", [""], "string_below_min_length"),
    ("bad_words", ["x" * 257], "string_above_max_length"),
    ("bad_words", ["\ud800"], "invalid_value"),
    ("bad_words", ["a"] * 129, "array_above_max_length"),
    ("bad_words_token_ids", 5, "invalid_type"),
    ("bad_words_token_ids", [(1,)] * 385, "array_above_max_length"),
    ("extra_args", [1], "invalid_type"),
    ("extra_args", {5: 1}, "invalid_type"),
    ("extra_args", dict.fromkeys(map(str, range(33))), "object_above_max_properties"),
    ("presence_penalty", 2.5, "decimal_above_max_value"),
    ("frequency_penalty", -2.5, "decimal_below_min_value"),
    ("repetition_penalty", 0.0, "decimal_below_min_value"),
    ("repetition_penalty", 1e9, "decimal_above_max_value"),
    ("seed", 2**63, "integer_above_max_value"),
    ("seed", -(2**63) - 1, "integer_below_min_value"),
    ("seed", "7", "invalid_type"),
    ("seed", False, "invalid_type"),
    ("max_tokens", 0, "integer_below_min_value"),
    ("max_tokens", -1, "integer_below_min_value"),
    ("max_tokens", "5", "invalid_type"),
    ("max_tokens", 2**70, "integer_above_max_value"),
    ("min_tokens", -1, "integer_below_min_value"),
    ("min_tokens", 17, "invalid_value"),
    ("logprobs", 21, "integer_above_max_value"),
    ("logprobs", True, "invalid_type"),
    ("logprobs", -1, "integer_below_min_value"),
    ("prompt_logprobs", -1, "integer_below_min_value"),
    ("prompt_logprobs", 21, "integer_above_max_value"),
    ("ignore_eos", 1, "invalid_type"),
    ("detokenize", None, "invalid_type"),
    ("skip_special_tokens", "yes", "invalid_type"),
    ("include_stop_str_in_output", 0, "invalid_type"),
    ("output_kind", "delta", "invalid_type"),
    ("stop", 5, "invalid_type"),
    ("stop", ["a", 5], "invalid_type"),
    ("stop", "", "string_below_min_length"),
    ("stop", ["a", ""], "string_below_min_length"),
    ("stop", ["a"] * 17, "array_above_max_length"),
    ("stop", "x" * 1025, "string_above_max_length"),
    ("stop", "ü" * 513, "string_above_max_length"),
    ("stop", "\ud800", "invalid_value"),
    ("stop_token_ids", 5, "invalid_type"),
    ("allowed_token_ids", [], "empty_array"),
    ("allowed_token_ids", [1] * 1001, "array_above_max_length"),
    ("logprob_token_ids", [1] * 129, "array_above_max_length"),
    ("logprob_token_ids", [1], "invalid_value"),
    ("thinking_token_budget", -2, "integer_below_min_value"),
    ("thinking_token_budget", True, "invalid_type"),
    ("logit_bias", [1], "invalid_type"),
    ("logit_bias", {1000: 1.0}, "invalid_value"),
    ("logit_bias", {-1: 1.0}, "invalid_value"),
    ("logit_bias", {"x": 1.0}, "invalid_value"),
    ("logit_bias", {"²": 1.0}, "invalid_value"),
    ("logit_bias", {1: 101}, "invalid_value"),
    ("logit_bias", {1: math.nan}, "invalid_value"),
    ("logit_bias", {1: "5"}, "invalid_type"),
    ("logit_bias", {True: 1.0}, "invalid_value"),
    ("logit_bias", {"9" * 5000: 1.0}, "invalid_value"),
    ("logit_bias", dict.fromkeys(range(1025), 1.0), "object_above_max_properties"),
]


@pytest.mark.parametrize(
    ("field", "value", "code"), TABLE, ids=[f"{row[0]}-{index}" for index, row in enumerate(TABLE)]
)
def test_a_bad_value_is_refused_under_its_own_field_and_code(field: str, value: object, code: str):
    error = refusal(LIMITS, **{field: value})
    assert (error.param, error.code) == (field, code)
    assert len(error.message) < 300


@pytest.mark.parametrize(("field", "value"), [
    ("temperature", 0), ("temperature", 2), ("top_p", 1), ("top_k", -1), ("top_k", 0), ("min_p", 0), ("n", 128),
    ("seed", 2**63 - 1), ("seed", -(2**63)), ("logprobs", 20), ("prompt_logprobs", 0), ("stop", ["x"] * 16),
    ("bad_words", ["x" * 256] * 128), ("bad_words_token_ids", [[0, 999]]), ("typical_p", 1),
    ("extra_args", {"a": [1, "b"]}),
    ("logit_bias", {"999": -100}), ("allowed_token_ids", [0, 999]), ("stop_token_ids", []), ("min_tokens", 16),
])  # fmt: skip
def test_the_ends_of_every_range_are_allowed(field: str, value: object):
    checked(SamplingParams(**{field: value}), LIMITS)


@pytest.mark.parametrize("field", ["logprobs", "prompt_logprobs"])
def test_the_whole_vocabulary_is_asked_for_by_minus_one(field: str):
    limits = dataclasses.replace(LIMITS, max_logprobs=LIMITS.vocab_size)
    assert getattr(checked(SamplingParams(**{field: -1}), limits), field) == LIMITS.vocab_size
    for value, allowed in ((-1, LIMITS), (-2, limits), (-1.0, limits)):
        with pytest.raises(InvalidRequestError):
            checked(SamplingParams(**{field: value}), allowed)


def test_tokens_that_are_named_take_the_place_of_the_most_likely_ones():
    params = checked(SamplingParams(logprobs=5, logprob_token_ids=[3, 999]))
    assert (params.logprobs, params.logprob_token_ids) == (0, (3, 999))


def test_a_limit_of_reasoning_is_dropped_where_there_is_none():
    given = check_sampling({"thinking_token_budget": 5}, LIMITS, {"n": "count"})
    tags = ThinkingTags((1,), (2,))
    limited, unlimited = given.with_thinking_tags(tags), given.with_thinking_tags(None)
    assert (limited.values["thinking_token_budget"], limited.values["thinking_tags"]) == (5, tags)
    assert (unlimited.values["thinking_token_budget"], unlimited.values.get("thinking_tags")) == (None, None)
    assert limited.names == unlimited.names == {"n": "count"}


def test_the_wording_is_that_of_openai():
    assert refusal(n=130).message == (
        "Invalid 'n': integer above maximum value. Expected a value <= 128, but got 130 instead."
    )
    assert refusal(temperature=3.5).message == (
        "Invalid 'temperature': decimal above maximum value. Expected a value <= 2, but got 3.5 instead."
    )
    assert refusal(temperature="1").message == (
        "Invalid type for 'temperature': expected a decimal, but got a string instead."
    )


def test_seeds_beyond_64_bits_are_refused_with_the_words_that_clients_look_for():
    assert "less_than_equal" in refusal(seed=2**63).message
    assert "greater_than_equal" in refusal(seed=-(2**63) - 1).message


def test_integers_of_thousands_of_digits_are_refused_and_not_echoed():
    message = refusal(seed=10**6000).message
    assert "an integer of 19932 bits" in message
    assert refusal(n=-(10**6000)).code == "integer_below_min_value"


@given(st.one_of(st.text(), st.integers(), st.floats(), st.booleans(), st.none(), st.lists(st.integers(), max_size=3)))
def test_no_value_of_any_type_gets_anything_but_admission_or_a_refusal(value):
    refused: list[tuple[str, InvalidRequestError]] = []
    for field in dataclasses.fields(SamplingParams):
        try:
            checked(SamplingParams(**{field.name: value}), LIMITS)
        except InvalidRequestError as error:
            refused.append((field.name, error))
    needed = {"infill": "top_k"}  # the field that another one does not go without
    assert all((error.param or "").partition("[")[0] in (name, needed.get(name)) for name, error in refused)
    assert all(len(error.message) < 300 for _, error in refused)


def test_at_most_64_characters_of_the_input_are_echoed_and_none_of_them_breaks_the_line():
    message = refusal(logit_bias={"z\n" * 300: 1.0}).message
    assert message.count("z") == 32
    assert "\n" not in message


def test_fields_are_named_as_the_user_knows_them():
    with pytest.raises(InvalidRequestError) as caught:
        checked(SamplingParams(logprobs=21), LIMITS, {"logprobs": "top_logprobs"})
    assert caught.value.param == "top_logprobs"
    assert "'top_logprobs'" in caught.value.message


def test_parameters_come_out_in_their_normal_form():
    params = checked(
        SamplingParams(temperature=1e-6, top_k=-1, seed=-1, stop="x", stop_token_ids=[3], logit_bias={"7": 1}), LIMITS
    )
    assert (params.temperature, params.top_k, params.seed, params.stop) == (0.0, 0, None, ("x",))
    assert (params.stop_token_ids, params.logit_bias) == ((3,), {7: 1.0})
    assert checked(SamplingParams(temperature=0.001), LIMITS).temperature == 0.01


def test_stop_strings_without_text_are_refused():
    assert refusal(stop="x", detokenize=False).param == "stop"


def prompt_refusal(token_ids: Any, **fields: Any) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        admit(token_ids, SamplingParams(**fields), param="prompt[2]")
    return caught.value


@pytest.mark.parametrize("token_id", [1000, -1, 2**70, -(2**70)])
def test_an_id_outside_the_logits_is_out_of_vocabulary(token_id: int):
    error = prompt_refusal([1, token_id])
    assert (error.param, error.code) == ("prompt[2][1]", "invalid_value")
    assert "out of vocabulary" in error.message


@pytest.mark.parametrize("token_id", [True, 1.0, "1", None, [1]])
def test_an_id_that_is_no_integer_is_refused(token_id: object):
    error = prompt_refusal([1, 2, token_id])
    assert (error.param, error.code) == ("prompt[2][2]", "invalid_value")


@pytest.mark.parametrize("bad", [0, 4095, 4096, 9999])
def test_the_first_id_at_fault_is_named_however_long_the_prompt(bad: int):
    token_ids: list[Any] = [1] * 10_000
    token_ids[bad], token_ids[-1] = -1, "x" if bad < 9999 else -1
    with pytest.raises(InvalidRequestError) as caught:
        check_token_ids("prompt", token_ids, 1000)
    assert caught.value.param == f"prompt[{bad}]"


def test_ids_behind_the_context_are_not_looked_at():
    class Ids(list[int]):
        def __getitem__(self, key: Any) -> Any:
            assert not isinstance(key, slice) or key.stop <= 100
            return super().__getitem__(key)

    check_token_ids("prompt", Ids([1] * 100 + [-1] * 1000), 1000, num_checked=100)
    assert prompt_refusal([1] * 100 + [-1]).code == "context_length_exceeded"
    assert prompt_refusal([1] * 99 + [-1, 1]).code == "invalid_value"


def test_an_empty_prompt_is_refused():
    assert prompt_refusal([]).code == "empty_array"


def test_a_prompt_as_long_as_the_context_is_refused_with_the_wording_of_openai():
    error = prompt_refusal([1] * 100)
    assert error.code == "context_length_exceeded"
    limit = "This model's maximum context length is 100 tokens. However, your prompt resulted in"
    assert error.message.startswith(f"{limit} 100 tokens, which leaves no room for a completion.")
    assert prompt_refusal([1] * 101).message.startswith(f"{limit} 101 tokens. Please reduce")


def test_a_prompt_and_an_explicit_output_that_do_not_fit_together_are_refused():
    error = prompt_refusal([1] * 90, max_tokens=11)
    assert error.code == "context_length_exceeded"
    assert "101 tokens (90 in the prompt, 11 in the completion)" in error.message


def test_more_output_than_the_model_can_ever_hold_has_an_error_of_its_own():
    error = prompt_refusal([1], max_tokens=5000)
    assert (error.param, error.code) == ("max_tokens", "invalid_value")
    assert error.message.startswith("max_tokens is too large: 5000.")


def test_a_defaulted_output_length_is_cut_to_what_fits():
    params = SamplingParams(max_tokens=None)
    assert admit([1] * 90, params).sampling_params.max_tokens == 10
    assert admit([1] * 90, params, default_max_tokens=16).sampling_params.max_tokens == 10
    assert admit([1] * 50, params, default_max_tokens=16).sampling_params.max_tokens == 16


def test_a_request_that_the_kv_cache_can_never_hold_is_refused():
    limits = dataclasses.replace(LIMITS, num_kv_tokens=32)
    with pytest.raises(InvalidRequestError) as caught:
        admit([1] * 20, SamplingParams(max_tokens=13), limits)
    assert caught.value.code == "context_length_exceeded"
    assert admit([1] * 20, SamplingParams(max_tokens=12), limits).sampling_params.max_tokens == 12


def test_no_output_at_all_is_allowed_with_echo_only():
    params = SamplingParams(max_tokens=0)
    assert admit([1], params, is_echo=True).sampling_params.max_tokens == 0
    assert prompt_refusal([1], max_tokens=0).code == "integer_below_min_value"


def test_the_fan_out_has_one_budget():
    check_fan_out(8, 128, LIMITS)
    with pytest.raises(InvalidRequestError) as caught:
        check_fan_out(9, 128, LIMITS)
    assert (caught.value.param, caught.value.code) == ("prompt", "request_budget_exceeded")
    with pytest.raises(InvalidRequestError) as caught:
        check_fan_out(0, 1, LIMITS)
    assert caught.value.code == "empty_array"


def test_only_a_text_that_surely_cannot_fit_is_refused_by_its_length():
    check_prompt_chars(500, LIMITS, 5, param="prompt")
    with pytest.raises(InvalidRequestError) as caught:
        check_prompt_chars(501, LIMITS, 5, param="prompt")
    assert caught.value.code == "context_length_exceeded"


@pytest.mark.parametrize(("max_chars_per_token", "is_cut"), [(None, False), (None, True), (5, True)])
@pytest.mark.parametrize(("max_model_len", "bound"), [(100, 1 << 18), (10**6, None)])
def test_where_any_length_could_fit_the_work_is_bounded(
    max_chars_per_token: int | None, is_cut: bool, max_model_len: int, bound: int | None
):
    limits = AdmissionLimits(max_model_len, 300)
    bound = bound or max_model_len * (max_chars_per_token or 128)
    check_prompt_chars(bound, limits, max_chars_per_token, param="input", is_cut=is_cut)
    with pytest.raises(InvalidRequestError) as caught:
        check_prompt_chars(bound + 1, limits, max_chars_per_token, param="input", is_cut=is_cut)
    assert (caught.value.param, caught.value.code) == ("input", "context_length_exceeded")


@given(
    st.builds(
        SamplingParams,
        n=st.integers(1, 128),
        temperature=st.floats(0, 2),
        top_p=st.floats(0.01, 1),
        top_k=st.integers(-1, 1000),
        seed=st.none() | st.integers(-(2**63), 2**63 - 1),
        max_tokens=st.none() | st.integers(1, 20),
        stop=st.none() | st.lists(st.text(min_size=1, max_size=5).filter(lambda text: text.isascii()), max_size=3),
    )
)
def test_admission_is_idempotent(params: SamplingParams):
    once = checked(params, LIMITS)
    assert checked(once, LIMITS) == once


def test_codes_are_those_of_the_error_contract():
    contract = Path(__file__).resolve().parents[5] / "shared" / "reference" / "errors.md"
    if not contract.is_file():
        pytest.skip("the error contract is not at hand")
    text = contract.read_text()
    codes = {code for _, _, code in TABLE} | {"context_length_exceeded", "request_budget_exceeded"}
    known_to_us = json.dumps(sorted(code for code in codes if code not in text))
    assert known_to_us == "[]"


@pytest.mark.parametrize(("value", "code"), [
    ({}, "invalid_type"), ([[]], "invalid_type"), ([1] * 257, "array_above_max_length"), (2**63, "invalid_value"),
    (math.nan, "invalid_value"), ("x" * 1025, "string_above_max_length"), (["\ud800"], "invalid_value"),
])  # fmt: skip
def test_a_bad_argument_of_a_logits_processor_is_refused_under_its_name(value: object, code: str):
    error = refusal(LIMITS, extra_args={"good": 1, "bad": value})
    assert (error.param, error.code) == ("extra_args.bad", code)


@pytest.mark.parametrize(("value", "param"), [([[]], "[0]"), ([[1], [1, 1000]], "[1][1]"), ([["a"]], "[0][0]")])
def test_a_bad_sequence_of_bad_words_is_named(value: object, param: str):
    assert refusal(LIMITS, bad_words_token_ids=value).param == f"bad_words_token_ids{param}"
