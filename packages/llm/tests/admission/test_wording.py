"""Each refusal says what was expected under the user's name of the field; the ends of ranges are admitted."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest

from llmstack_llm.admission.bad_words import check_bad_words
from llmstack_llm.admission.limits import AdmissionLimits, check_fan_out, check_prompt_chars, max_prompt_chars
from llmstack_llm.admission.rules import check_truncation
from llmstack_llm.admission.sampling import CheckedSampling, check_sampling, given_fields, resolve_max_tokens
from llmstack_llm.admission.seeds import completion_seed, draw_seed
from llmstack_llm.admission.structured_outputs import (
    ConstraintAdmission,
    StructuredOutputsConfig,
    read_structured_outputs_config,
)
from llmstack_types import (
    InvalidRequestError,
    RepetitionDetectionParams,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)

LIMITS = AdmissionLimits(max_model_len=100, vocab_size=1000, num_kv_tokens=80)
NAMES = {
    "max_tokens": "limit", "min_tokens": "least", "n": "num", "best_of": "best", "use_beam_search": "beams",
    "length_penalty": "lp", "early_stopping": "es", "temperature": "temp", "stop": "ends", "detokenize": "text",
    "structured_outputs": "form", "allowed_token_ids": "allowed", "top_p": "nucleus",
}  # fmt: skip
DELTA = RequestOutputKind.DELTA
BEAMS: dict[str, Any] = {"use_beam_search": True, "n": 2}


def checked(fields: Mapping[str, Any], names: Mapping[str, str] = NAMES) -> CheckedSampling:
    return check_sampling(given_fields(SamplingParams(**fields)), LIMITS, names)


def too_long(what: str, maximum: int) -> str:
    article = "an" if what == "array" else "a"
    expected = f"Expected {article} {what} with maximum length {maximum}"
    return f"{what} too long. {expected}, but got {article} {what} with length {maximum + 1} instead."


def too_many(maximum: int) -> str:
    expected = f"Expected an object with at most {maximum} properties"
    return f"too many properties. {expected}, but got an object with {maximum + 1} properties instead."


REFUSALS: list[tuple[dict[str, Any], str, str]] = [
    ({"bad_words": "w"}, "bad_words", "expected an array of strings, but got a string instead."),
    ({"bad_words": ["a", 5]}, "bad_words", "expected an array of strings, but got an integer instead."),
    ({"bad_words": ["x" * 257]}, "bad_words", too_long("string", 256)),
    ({"bad_words": ["a"] * 129}, "bad_words", too_long("array", 128)),
    ({"bad_words": ["\ud800"]}, "bad_words", "the text holds half a surrogate pair."),
    ({"bad_words_token_ids": 5}, "bad_words_token_ids",
     "expected an array of arrays of token ids, but got an integer instead."),
    ({"bad_words_token_ids": [(1,)] * 385}, "bad_words_token_ids", too_long("array", 384)),
    ({"bad_words_token_ids": [[1], [1] * 257]}, "bad_words_token_ids[1]", too_long("array", 256)),
    ({"bad_words_token_ids": [(1,), (1000,)]}, "bad_words_token_ids[1][0]",
     "token id 1000 is out of vocabulary, expected 0 <= id < 1000."),
    ({"bad_words_token_ids": [(1,), ()]}, "bad_words_token_ids[1]",
     "empty array. Expected an array with minimum length 1, but got an empty array instead."),
    ({"extra_args": [1]}, "extra_args", "expected an object, but got an array instead."),
    ({"extra_args": {5: 1}}, "extra_args", "expected an object with string keys, but got an integer instead."),
    ({"extra_args": dict.fromkeys(map(str, range(33)))}, "extra_args",
     too_many(32)),
    ({"extra_args": {"a": [1] * 257}}, "extra_args.a", too_long("array", 256)),
    ({"extra_args": {"a": ["b", {}]}}, "extra_args.a",
     "expected a scalar or an array of scalars, but got an object instead."),
    ({"extra_args": {"a": "x" * 1025}}, "extra_args.a", too_long("string", 1024)),
    ({"extra_args": {"a": 2**63}}, "extra_args.a", "an integer must have at most 64 bits."),
    ({"extra_args": {"a": -(2**63) - 1}}, "extra_args.a", "an integer must have at most 64 bits."),
    ({"extra_args": {"a": math.inf}}, "extra_args.a", "expected a finite number."),
    ({"extra_args": {"a": "\ud800"}}, "extra_args.a", "the text holds half a surrogate pair."),
    ({"logit_bias": [1]}, "logit_bias", "expected an object, but got an array instead."),
    ({"logit_bias": {1000: 1.0}}, "logit_bias", "token id 1000 is out of vocabulary, expected 0 <= id < 1000."),
    ({"logit_bias": {"x": 1.0}}, "logit_bias", "'x' is not a token id."),
    ({"logit_bias": {"9" * 20: 1}}, "logit_bias", "'99999999999999999999' is not a token id."),
    ({"logit_bias": {1: 100.5}}, "logit_bias", "every bias must lie between -100 and 100."),
    ({"logit_bias": {1: -101}}, "logit_bias", "every bias must lie between -100 and 100."),
    ({"logit_bias": {1: "5"}}, "logit_bias", "expected an object of decimals, but got a string instead."),
    ({"logit_bias": dict.fromkeys(range(1025), 1.0)}, "logit_bias",
     too_many(1024)),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "expected -1, or an integer of at least 1."),
    ({"truncate_prompt_tokens": 81}, "truncate_prompt_tokens",
     "integer above maximum value. Expected a value <= 80, but got 81 instead."),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens",
     "integer below minimum value. Expected a value >= -1, but got -2 instead."),
    ({"truncation_side": "up"}, "truncation_side", "expected one of right, left."),
    ({"stop_token_ids": [1] * 1025}, "stop_token_ids", too_long("array", 1024)),
    ({"logprobs": 21}, "logprobs", "integer above maximum value. Expected a value <= 20, but got 21 instead."),
    ({"prompt_logprobs": -1}, "prompt_logprobs",
     "integer below minimum value. Expected a value >= 0, but got -1 instead."),
    ({"best_of": 2, "n": 3}, "best", "it must not be below 'num'."),
    ({"best_of": 2, "output_kind": DELTA}, "best", "the best is known at the end, so it cannot be streamed."),
    (BEAMS | {"best_of": 3}, "best", "a beam search keeps 'num' beams."),
    ({"best_of": 2, "temperature": 0.0}, "best", "at temperature 0 all completions are the same."),
    ({"length_penalty": 2.0}, "lp", "it is only allowed together with 'beams'."),
    ({"early_stopping": True}, "es", "it is only allowed together with 'beams'."),
    ({"early_stopping": "no"}, "es", "expected true, false or 'never'."),
    (BEAMS | {"output_kind": DELTA}, "beams", "its result is known at the end, so it cannot be streamed."),
    (BEAMS | {"temperature": 0.5}, "temp", "with 'beams' nothing is drawn, so it must be 0 or 1."),
    (BEAMS | {"top_p": 0.5}, "nucleus", "it cannot be combined with 'beams'."),
    ({"max_tokens": 0}, "limit", "integer below minimum value. Expected a value >= 1, but got 0 instead."),
    ({"max_tokens": 3, "min_tokens": 4}, "least", "must not be above 'limit'."),
    ({"stop": "a", "detokenize": False}, "ends", "stop strings need 'detokenize'."),
    ({"structured_outputs": 5}, "form", "expected an object, but got an integer instead."),
    ({"structured_outputs": StructuredOutputsParams(regex="a"), "allowed_token_ids": [1]}, "allowed",
     "it cannot be combined with 'form'."),
    ({"stop": ["a", 5]}, "ends", "expected a string or an array of strings, but got an integer instead."),
    ({"stop": 5}, "ends", "expected a string or an array of strings, but got an integer instead."),
    ({"temperature": math.nan}, "temp", "expected a finite number."),
    ({"repetition_detection": [1]}, "repetition_detection", "expected an object, but got an array instead."),
    ({"repetition_detection": {"max_pattern_size": 3, "min_pattern_size": 4, "min_count": 2}},
     "repetition_detection.min_pattern_size", "must not be above 'max_pattern_size'."),
    ({"repetition_detection": {"max_pattern_size": 3, "min_count": 1}}, "repetition_detection.min_count",
     "integer below minimum value. Expected a value >= 2, but got 1 instead."),
    ({"repetition_detection": {"max_pattern_size": "3"}}, "repetition_detection.max_pattern_size",
     "expected an integer, but got a string instead."),
]  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "param", "words"), REFUSALS, ids=[f"{row[1]}-{n}" for n, row in enumerate(REFUSALS)]
)
def test_a_refusal_says_what_was_expected(fields: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        checked(fields)
    assert caught.value.param == param
    assert caught.value.message in (f"Invalid '{param}': {words}", f"Invalid type for '{param}': {words}")


@pytest.mark.parametrize(
    ("given", "normal"),
    [
        ({"bad_words": None}, None),
        ({"bad_words": ["a"]}, ("a",)),
        ({"extra_args": None}, None),
        ({"extra_args": {"a": ["x" * 1024, 2**63 - 1, -(2**63), True, None, 1.5] + [1] * 250}},
         {"a": ["x" * 1024, 2**63 - 1, -(2**63), True, None, 1.5] + [1] * 250}),
        ({"extra_args": dict.fromkeys(map(str, range(32)), "ä")}, dict.fromkeys(map(str, range(32)), "ä")),
        ({"logit_bias": {"999": 100, 0: -100, "0": 1}}, {999: 100.0, 0: 1.0}),
        ({"logit_bias": dict.fromkeys(range(1000), 1)}, dict.fromkeys(range(1000), 1.0)),
        ({"truncate_prompt_tokens": 80}, 80),
        ({"truncate_prompt_tokens": 1}, 1),
        ({"truncate_prompt_tokens": -1}, -1),
        ({"truncation_side": "left"}, "left"),
        ({"stop_token_ids": [1] * 1024}, (1,) * 1024),
        ({"allowed_token_ids": [0]}, (0,)),
        ({"logprobs": 20}, 20),
        ({"logprobs": None}, None),
        ({"temperature": 0.005}, 0.01),
        ({"temperature": 1e-5}, 0.01),
        ({"temperature": 0.9e-5}, 0.0),
        ({"top_k": -1}, 0),
        ({"seed": -1}, None),
        ({"logit_bias": None}, None),
        ({"stop_token_ids": None}, None),
        ({"allowed_token_ids": None}, None),
        ({"stop": None}, ()),
        ({"repetition_detection": {"max_pattern_size": 0}}, None),
        ({"repetition_detection": {"max_pattern_size": 3, "min_count": 2, "min_pattern_size": None}},
         RepetitionDetectionParams(max_pattern_size=3, min_pattern_size=0, min_count=2)),
        ({"repetition_detection": RepetitionDetectionParams(max_pattern_size=3, min_pattern_size=2, min_count=4)},
         RepetitionDetectionParams(max_pattern_size=3, min_pattern_size=2, min_count=4)),
        ({"best_of": 3, "n": 3, "temperature": 0.0}, 3),
        ({"best_of": 1, "output_kind": DELTA}, 1),
    ],
)  # fmt: skip
def test_the_ends_of_the_ranges_are_admitted_in_their_normal_form(given: dict[str, Any], normal: Any) -> None:
    name = next(iter(given))
    fields = check_sampling(given, LIMITS).values
    assert fields[name] == normal
    assert type(fields[name]) is type(normal)


def resolved(num_prompt_tokens: int, limits: AdmissionLimits = LIMITS, **options: Any) -> int:
    fields = {name: options.pop(name) for name in ("max_tokens", "min_tokens") if name in options}
    return resolve_max_tokens(CheckedSampling(fields, NAMES), num_prompt_tokens, limits, **options)


@pytest.mark.parametrize(
    ("num_prompt_tokens", "options", "param", "words"),
    [
        (80, {"param": "messages"}, "messages", "80 tokens"),
        (70, {"min_tokens": 11}, "least", "Invalid 'least': only 10 tokens can be generated here."),
        (70, {"min_tokens": 6, "default_max_tokens": 5}, "least", "only 5 tokens can be generated here."),
        (5, {"max_tokens": 101}, "limit", "100"),
        (70, {"max_tokens": 11, "param": "messages"}, "messages", "81 tokens"),
    ],
)
def test_lengths_that_do_not_fit_are_refused_with_their_numbers(
    num_prompt_tokens: int, options: dict[str, Any], param: str, words: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        resolved(num_prompt_tokens, **options)
    assert caught.value.param == param
    assert words in caught.value.message


def test_lengths_that_fit_exactly_are_admitted() -> None:
    assert resolved(79) == 1
    assert resolved(70, max_tokens=10) == 10
    assert resolved(70, min_tokens=10) == 10
    assert resolved(70, min_tokens=5, default_max_tokens=5) == 5
    assert resolved(70, default_max_tokens=50) == 10
    assert resolved(5, AdmissionLimits(max_model_len=100, vocab_size=9), max_tokens=95) == 95


def test_the_fan_out_is_bounded_by_its_product() -> None:
    limits = AdmissionLimits(max_model_len=9, vocab_size=9, max_num_completions=6)
    check_fan_out(2, 3, limits)
    for num_prompts, n in ((7, 1), (3, 3), (1, 7)):
        with pytest.raises(InvalidRequestError) as caught:
            check_fan_out(num_prompts, n, limits, param="input")
        assert (caught.value.param, caught.value.code) == ("input", "request_budget_exceeded")
        assert all(str(number) in caught.value.message for number in (num_prompts, n, 6))
    with pytest.raises(InvalidRequestError) as caught:
        check_fan_out(0, 1, limits)
    assert (caught.value.param, caught.value.code) == ("prompt", "empty_array")
    with pytest.raises(InvalidRequestError, match="'input'"):
        check_fan_out(0, 1, limits, param="input")


def test_the_bound_of_a_text_is_that_of_its_longest_tokens() -> None:
    assert max_prompt_chars(LIMITS, 7) == 560
    assert max_prompt_chars(LIMITS, 7, is_cut=True) == max_prompt_chars(LIMITS, None) == 1 << 18
    long = AdmissionLimits(max_model_len=1 << 20, vocab_size=9)
    assert max_prompt_chars(long, 2, is_cut=True) == 1 << 21
    assert max_prompt_chars(long, None) == 128 << 20
    check_prompt_chars(560, LIMITS, 7, param="prompt")
    check_prompt_chars(561, LIMITS, 7, param="prompt", is_cut=True)
    with pytest.raises(InvalidRequestError) as caught:
        check_prompt_chars(561, LIMITS, 7, param="input")
    assert (caught.value.param, caught.value.code) == ("input", "context_length_exceeded")
    assert "80 tokens" in caught.value.message


def test_truncation_to_minus_one_means_all_that_fits() -> None:
    assert check_truncation("t", -1, 50) == 50
    assert check_truncation("t", 50, 50) == 50
    assert check_truncation("t", None, 50) is None


def test_the_longest_bad_words_are_admitted() -> None:
    check_bad_words("bad_words", ["ä" * 128] * 128)
    with pytest.raises(InvalidRequestError, match="length 257"):
        check_bad_words("bad_words", ["ä" * 128 + "a"])


def test_a_constraint_and_kept_tokens_are_added_to_the_fields_that_are_there() -> None:
    fields = checked({"max_tokens": 5})
    constrained = fields.with_constraint(StructuredOutputsParams(regex="a"), {"structured_outputs": "response_format"})
    assert constrained.values["max_tokens"] == 5
    assert constrained.values["structured_outputs"].regex == "a"
    assert constrained.names == NAMES | {"structured_outputs": "response_format"}
    kept = fields.with_kept_tokens(("<a>",))
    assert kept.values == {**fields.values, "kept_special_tokens": ("<a>",)}
    assert kept.names == NAMES
    assert (CheckedSampling({}).num_generated, CheckedSampling({"n": 3}).num_generated) == (1, 3)
    assert CheckedSampling({"n": 2, "best_of": 4}).num_generated == 4


def test_the_seeds_of_completions_are_those_of_the_published_generator() -> None:
    # The first outputs of SplitMix64 for the seed 0 are e220a8397b1dcdaf, 6e789e6aa1b965f4 and 06c45d188009454f.
    assert completion_seed(0, 0) == 0
    assert completion_seed(77, 0) == 77
    assert [completion_seed(0, index) for index in (1, 2, 3)] == [
        0xE220A8397B1DCDAF & (2**63 - 1),
        0x6E789E6AA1B965F4,
        0x06C45D188009454F,
    ]
    assert completion_seed(-5, 1) == completion_seed(2**64 - 5, 1)


def test_drawn_seeds_have_63_bits() -> None:
    seeds = [draw_seed() for _ in range(200)]
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert max(seeds) >= 2**62  # fails once in 2**200 times
    assert len(set(seeds)) == 200


def test_a_field_of_repetition_detection_that_is_unknown_is_named() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check_sampling({"repetition_detection": {"size": 1}}, LIMITS)
    error = caught.value
    assert (error.param, error.code) == ("repetition_detection.size", "unsupported_parameter")
    assert error.message == ("Unsupported parameter: 'repetition_detection.size' is not supported by this server.")


def test_a_model_that_only_pools_generates_nothing() -> None:
    limits = AdmissionLimits(max_model_len=9, vocab_size=9, is_generative=False)
    with pytest.raises(InvalidRequestError) as caught:
        check_sampling({}, limits)
    assert caught.value.param == "model"


@pytest.mark.parametrize(
    ("value", "words"),
    [("{", "it is not valid JSON: "), ("[" * 100_000, "it is not valid JSON: "), ([1], "it is not a JSON object")],
)
def test_a_configuration_of_constraints_that_is_no_object_is_refused(value: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_structured_outputs_config(value)


async def test_without_a_constraint_there_is_no_process_to_end() -> None:
    await ConstraintAdmission(None, (), StructuredOutputsConfig()).shutdown()
