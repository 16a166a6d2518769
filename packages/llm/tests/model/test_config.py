"""Facts from a model's folder."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from llmstack_llm.model.config import ModelConfigError, load_model_config
from llmstack_llm.testing import write_model_folder

YARN = {"rope_type": "yarn", "original_max_position_embeddings": 128}


@pytest.mark.parametrize(("config", "expected"), [
    ({"n_positions": 1024}, 1024),
    ({"model_type": "opt", "n_positions": None, "max_position_embeddings": 2048}, 2048),
    ({"model_type": "llama", "n_positions": None, "max_position_embeddings": 512}, 512),
    ({"n_positions": None}, 2048),
    ({"rope_scaling": {**YARN, "factor": 4.0}}, 512),
    ({"n_positions": 600, "rope_parameters": {**YARN, "factor": 4}}, 600),
    ({"rope_scaling": {**YARN, "rope_type": "linear", "factor": 4.0}}, 128),
])  # fmt: skip
def test_the_longest_request_is_what_the_checkpoint_was_made_for(tmp_path: Path, config: dict[str, Any], expected: int):
    assert load_model_config(str(write_model_folder(tmp_path / "m", config=config))).max_model_len == expected


def test_what_published_configurations_leave_out_is_filled_in(tmp_path: Path):
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": {"hidden_size": 2560}}
    facts = load_model_config(str(write_model_folder(tmp_path, config=config)))
    assert (facts.vocab_size, facts.max_position_embeddings) == (262_208, 131_072)


def test_a_longer_request_than_the_model_has_positions_for_is_refused_with_both_numbers(tmp_path: Path):
    folder = write_model_folder(tmp_path / "m", config={"n_positions": 1024})
    with pytest.raises(ModelConfigError, match=r"max_model_len 4096: .* 1024 tokens"):
        load_model_config(str(folder), max_model_len=4096)
    assert load_model_config(str(folder), max_model_len=256).max_model_len == 256


@pytest.mark.parametrize(("generation", "expected"), [
    (None, (256,)), ({"eos_token_id": 7}, (7,)), ({"eos_token_id": [1, 2, 1]}, (1, 2)), ({"eos_token_id": None}, ()),
    ({"eos_token_id": "7"}, (7,)), ({"eos_token_id": ["<|endoftext|>", 3, "<none>"]}, (256, 3)),
])  # fmt: skip
def test_end_of_sequence_ids_may_be_one_or_many(
    tmp_path: Path, generation: dict[str, Any] | None, expected: tuple[int]
):
    assert load_model_config(str(write_model_folder(tmp_path, generation_config=generation))).eos_token_ids == expected


def test_the_models_sampling_defaults_apply_and_the_log_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    folder = write_model_folder(tmp_path, generation_config={"temperature": 0.6, "top_k": 20, "max_new_tokens": 99})
    with caplog.at_level(logging.WARNING):
        params = load_model_config(str(folder)).default_sampling_params()
    assert (params.temperature, params.top_k, params.max_tokens, params.top_p) == (0.6, 20, 99, 1.0)
    assert "temperature=0.6" in caplog.text
    plain = load_model_config(str(folder), generation_config="vllm").default_sampling_params()
    assert (plain.temperature, plain.max_tokens) == (1.0, None)


def test_values_of_the_configuration_can_be_replaced(tmp_path: Path):
    folder = str(write_model_folder(tmp_path, config={"n_positions": 1024, "rope": {"a": 1, "b": 2}}))
    facts = load_model_config(folder, hf_overrides={"n_positions": 64, "rope": {"b": 3}})
    assert (facts.max_model_len, facts.hf_config["rope"]) == (64, {"a": 1, "b": 3})


def test_minus_one_allows_log_probabilities_of_the_whole_vocabulary(tmp_path: Path):
    folder = str(write_model_folder(tmp_path))
    assert load_model_config(folder).max_logprobs == 20
    assert load_model_config(folder, max_logprobs=-1).max_logprobs == load_model_config(folder).vocab_size


@pytest.mark.parametrize(
    "config",
    [{"vocab_size": None}, {"vocab_size": 0}, {"architectures": []}, {"architectures": None}, {"text_config": 3}],
)
def test_a_folder_that_lacks_a_needed_fact_is_refused_by_its_name(tmp_path: Path, config: dict[str, Any]):
    with pytest.raises(ModelConfigError, match=next(iter(config))):
        load_model_config(str(write_model_folder(tmp_path, config=config)))
