"""What a model's own file says of beam searches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llmstack_llm.admission.sampling import GivenSampling
from llmstack_llm.input_processor import InputProcessor
from llmstack_llm.model.beam_defaults import BeamDefaults, beam_defaults
from llmstack_llm.model.config import load_model_config
from llmstack_llm.testing import write_model_folder
from llmstack_types import InvalidRequestError, SamplingParams

BEAMS = {"use_beam_search": True, "n": 2, "max_tokens": 6}


def test_keys_become_fields_and_what_is_neutral_is_nothing():
    keys = {
        "length_penalty": 2.0, "early_stopping": True, "no_repeat_ngram_size": 3, "forced_eos_token_id": [7],
        "bad_words_ids": [[1]], "min_length": 9, "min_new_tokens": None, "num_beams": 4, "diversity_penalty": 0.0,
        "num_beam_groups": 1, "suppress_tokens": [], "encoder_no_repeat_ngram_size": 0, "renormalize_logits": False,
    }  # fmt: skip
    assert beam_defaults(keys, is_speech=False) == BeamDefaults(
        {
            "length_penalty": 2.0, "early_stopping": True, "no_repeat_ngram_size": 3, "forced_eos_token_id": 7,
            "bad_words_token_ids": [[1]],
        },
        min_length=9,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("keys", "refused"),
    [
        ({"diversity_penalty": 0.5}, ("diversity_penalty",)),
        ({"suppress_tokens": [5], "begin_suppress_tokens": [6]}, ("suppress_tokens", "begin_suppress_tokens")),
        ({"forced_eos_token_id": [5, 6]}, ("forced_eos_token_id",)),
        ({"exponential_decay_length_penalty": [5, 1.5]}, ("exponential_decay_length_penalty",)),
        ({"renormalize_logits": True, "guidance_scale": 2}, ("guidance_scale", "renormalize_logits")),
    ],
)
def test_keys_that_no_beam_search_applies_are_named(keys: dict[str, Any], refused: tuple[str, ...]):
    assert beam_defaults(keys, is_speech=False).refused == refused
    assert "suppress_tokens" not in beam_defaults(keys, is_speech=True).refused


def test_the_least_length_counts_the_prompt_and_no_more_than_may_be_generated():
    assert BeamDefaults(min_length=9).min_tokens(2, 100) == 7
    assert BeamDefaults(min_length=9).min_tokens(12, 100) == 0
    assert BeamDefaults(min_length=9, min_new_tokens=5).min_tokens(12, 100) == 5
    assert BeamDefaults(min_length=90).min_tokens(2, 6) == 6


def admitted(folder: Path, file: dict[str, Any], **fields: Any) -> SamplingParams:
    model = write_model_folder(folder, generation_config=file)
    processor = InputProcessor(load_model_config(str(model), skip_tokenizer_init=True), None)
    return processor.admit([1, 2, 3], processor.check_sampling(GivenSampling(fields))).sampling_params


def test_a_request_takes_what_it_does_not_give(tmp_path: Path):
    file = {"length_penalty": 2.0, "min_length": 7, "repetition_penalty": 1.5, "top_p": 0.3, "no_repeat_ngram_size": 2}
    params = admitted(tmp_path, file, **BEAMS, no_repeat_ngram_size=4)
    assert (params.length_penalty, params.min_tokens, params.repetition_penalty) == (2.0, 4, 1.5)
    assert (params.top_p, params.no_repeat_ngram_size) == (1.0, 4)
    plain = admitted(tmp_path, file, max_tokens=6)
    assert (plain.length_penalty, plain.min_tokens, plain.top_p, plain.no_repeat_ngram_size) == (1.0, 0, 0.3, 0)


def test_sampling_params_replace_all_that_the_file_says(tmp_path: Path):
    model = write_model_folder(tmp_path, generation_config={"length_penalty": 2.0, "min_length": 7})
    processor = InputProcessor(load_model_config(str(model), skip_tokenizer_init=True), None)
    params = processor.admit([1, 2, 3], processor.check_params(SamplingParams(**BEAMS))).sampling_params
    assert (params.length_penalty, params.min_tokens) == (1.0, 0)


@pytest.mark.parametrize(
    ("file", "param"), [({"length_penalty": 99}, "length_penalty"), ({"diversity_penalty": 1}, "use_beam_search")]
)
def test_a_file_that_cannot_be_applied_is_an_error_of_beam_searches_alone(
    file: dict[str, Any], param: str, tmp_path: Path
):
    with pytest.raises(InvalidRequestError) as caught:
        admitted(tmp_path, file, **BEAMS)
    assert caught.value.param == param
    assert admitted(tmp_path, file, max_tokens=6)
