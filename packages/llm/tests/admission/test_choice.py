"""What goes together with `best_of` and with a beam search."""

from __future__ import annotations

from typing import Any

import pytest

from llmstack_llm import BeamSearchParams
from llmstack_llm.admission.limits import AdmissionLimits
from llmstack_llm.admission.sampling import check_sampling, given_fields
from llmstack_types import InvalidRequestError, RequestOutputKind, SamplingParams

LIMITS = AdmissionLimits(max_model_len=100, vocab_size=1000)
DELTA, CUMULATIVE, FINAL_ONLY = RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE, RequestOutputKind.FINAL_ONLY
BEAMS: dict[str, Any] = {"use_beam_search": True, "n": 2}


def admit(**fields: Any) -> SamplingParams:
    return SamplingParams(**check_sampling(given_fields(SamplingParams(**fields)), LIMITS).values)


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"best_of": 0}, "best_of", "integer_below_min_value"),
        ({"best_of": 21}, "best_of", "integer_above_max_value"),
        ({"best_of": 2.0}, "best_of", "invalid_type"),
        ({"best_of": 2, "n": 3}, "best_of", "invalid_value"),
        ({"best_of": 2, "temperature": 0.0}, "best_of", "invalid_value"),
        ({"best_of": 2, "output_kind": DELTA}, "best_of", "invalid_value"),
        ({"best_of": 2, "n": 2, "output_kind": DELTA}, "best_of", "invalid_value"),
        ({"use_beam_search": 1}, "use_beam_search", "invalid_type"),
        ({"length_penalty": "1"}, "length_penalty", "invalid_type"),
        ({"length_penalty": -11}, "length_penalty", "decimal_below_min_value"),
        ({"length_penalty": 2.0}, "length_penalty", "invalid_value"),
        ({"early_stopping": True}, "early_stopping", "invalid_value"),
        (BEAMS | {"early_stopping": 1}, "early_stopping", "invalid_value"),
        (BEAMS | {"early_stopping": "Never"}, "early_stopping", "invalid_value"),
        (BEAMS | {"early_stopping": []}, "early_stopping", "invalid_value"),
        (BEAMS | {"best_of": 3}, "best_of", "invalid_value"),
        (BEAMS | {"output_kind": DELTA}, "use_beam_search", "invalid_value"),
        (BEAMS | {"temperature": 0.5}, "temperature", "invalid_value"),
        (BEAMS | {"top_p": 0.9}, "top_p", "invalid_value"),
        (BEAMS | {"top_k": 5}, "top_k", "invalid_value"),
        (BEAMS | {"min_p": 0.1}, "min_p", "invalid_value"),
        (BEAMS | {"presence_penalty": 1.1}, "presence_penalty", "invalid_value"),
        ({"forced_eos_token_id": 2}, "forced_eos_token_id", "invalid_value"),
        (BEAMS | {"stop": ["a"]}, "stop", "invalid_value"),
        (BEAMS | {"prompt_logprobs": 0}, "prompt_logprobs", "invalid_value"),
        (BEAMS | {"logit_bias": {1: 2.0}}, "logit_bias", "invalid_value"),
    ],
)
def test_what_cannot_be_is_refused_by_name(fields: dict[str, Any], param: str, code: str):
    with pytest.raises(InvalidRequestError) as caught:
        admit(**fields)
    assert (caught.value.param, caught.value.code) == (param, code)


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0.0}, {"temperature": 1}, {"seed": 5}, {"stop_token_ids": [4]}, {"ignore_eos": True},
        {"logprobs": 3}, {"top_k": -1}, {"stop": []}, {"logit_bias": {}}, {"early_stopping": "never"},
        {"length_penalty": -0.5}, {"best_of": 2}, {"skip_special_tokens": False}, {"min_tokens": 2},
        {"allowed_token_ids": [1]}, {"repetition_penalty": 1.1}, {"no_repeat_ngram_size": 3}, {"bad_words": ["x"]},
        {"bad_words_token_ids": [[1]]}, {"forced_eos_token_id": 2},
    ],
)  # fmt: skip
def test_what_beams_apply_goes_with_a_beam_search(fields: dict[str, Any]):
    assert admit(**BEAMS | fields).use_beam_search


def test_completions_chosen_at_the_end_are_returned_at_the_end():
    assert admit(best_of=3).output_kind is FINAL_ONLY
    assert admit(**BEAMS).output_kind is FINAL_ONLY
    assert admit(best_of=2, n=2).output_kind is CUMULATIVE
    assert admit(best_of=1, output_kind=DELTA).output_kind is DELTA


def test_the_parameters_of_a_beam_search_have_the_names_of_vllm():
    fields = BeamSearchParams(3, 7, ignore_eos=True, length_penalty=0.5).to_fields()
    params = SamplingParams(**check_sampling(fields, LIMITS).values)
    assert (params.n, params.max_tokens, params.ignore_eos, params.length_penalty) == (3, 7, True, 0.5)
    assert params.use_beam_search
