"""Configurations of models with several parts: that of the text model, wherever its fields are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llmstack_model_files import TEXT_PART_OF, overridden, read_model_config, text_config_of

LLAVA: dict[str, Any] = {
    "architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", "torch_dtype": "float16",
    "vision_config": {"hidden_size": 8}, "image_token_index": 7,
    "text_config": {"model_type": "mistral", "hidden_size": 64, "num_key_value_heads": 2},
}  # fmt: skip


def test_the_text_models_own_fields_and_those_of_the_whole_are_together() -> None:
    found = text_config_of(LLAVA)
    assert (found["architectures"], found["model_type"]) == (["MistralForCausalLM"], "mistral")
    assert (found["hidden_size"], found["num_key_value_heads"], found["num_hidden_layers"]) == (64, 2, 32)
    assert (found["torch_dtype"], found[TEXT_PART_OF]) == ("float16", "LlavaForConditionalGeneration")
    assert "vision_config" not in found
    assert "image_token_index" not in found


@pytest.mark.parametrize(
    "config",
    [
        {"architectures": ["LlamaForCausalLM"], "text_config": {"model_type": "llama"}},
        LLAVA | {"text_config": {"model_type": "mamba"}},
        LLAVA | {"text_config": 3},
        {"architectures": 3},
        {},
    ],
)
def test_others_are_as_they_were(config: dict[str, Any]) -> None:
    assert text_config_of(config) == config


@pytest.mark.parametrize("field", ["rope_scaling", "rope_parameters"])
def test_positions_of_three_axes_are_those_of_text(field: str) -> None:
    rope = {"type": "mrope", "mrope_section": [1, 1, 2], "rope_theta": 5.0}
    found = text_config_of({"architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl",
                       "hidden_size": 64, field: rope, "vision_config": {}})  # fmt: skip
    assert found[field] == {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 5.0}
    assert (found["architectures"], found["hidden_size"]) == (["Qwen2ForCausalLM"], 64)


@pytest.mark.parametrize(
    ("whole", "text", "expected"),
    [({}, {}, True), ({"tie_word_embeddings": False}, {}, False), ({}, {"tie_word_embeddings": False}, False)],
)
def test_the_head_is_tied_as_the_class_says(whole: dict[str, Any], text: dict[str, Any], expected: bool) -> None:
    config = {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": {"hidden_size": 8, **text}, **whole}
    assert text_config_of(config)["tie_word_embeddings"] is expected


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({"max_position_embeddings": 77}, {"max_position_embeddings": 77}),
        ({"rope_scaling": {"rope_type": "yarn"}}, {"rope_scaling": {"rope_type": "yarn"}}),
        ({"text_config": {"hidden_size": 32}}, {"hidden_size": 32}),
        ({"torch_dtype": "float32"}, {"torch_dtype": "float32"}),
        ({"vision_config": {"hidden_size": 4}}, {}),
    ],
)
def test_overrides_are_of_the_text_model(overrides: dict[str, Any], expected: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAVA))
    found = read_model_config(tmp_path, overrides)
    whole = found["whole_config"]
    assert found == read_model_config(tmp_path, {}) | expected | {"whole_config": whole}
    assert whole == overridden(LLAVA, overrides)


def test_a_number_of_experts_is_not_absent_under_its_other_name() -> None:
    whole = {"architectures": ["Qwen3VLMoeForConditionalGeneration"]}
    assert "num_experts" not in text_config_of(whole | {"text_config": {"num_local_experts": 4}})
    assert text_config_of(whole | {"text_config": {}})["num_experts"] == 60


def test_the_part_that_thinks_is_the_text_model_of_one_that_speaks() -> None:
    text = {"model_type": "qwen2_5_omni_text", "hidden_size": 64}
    thinker = {"model_type": "qwen2_5_omni_thinker", "text_config": text, "audio_config": {"d_model": 8}}
    published = {
        "architectures": ["Qwen2_5OmniModel"], "model_type": "qwen2_5_omni", "torch_dtype": "bfloat16",
        "thinker_config": thinker, "talker_config": {"hidden_size": 3},
    }  # fmt: skip
    found = text_config_of(published)
    assert (found["architectures"], found["model_type"]) == (["Qwen2ForCausalLM"], "qwen2")
    assert (found["hidden_size"], found["num_hidden_layers"], found["tie_word_embeddings"]) == (64, 28, False)
    assert (found["torch_dtype"], found[TEXT_PART_OF]) == ("bfloat16", "Qwen2_5OmniModel")
    alone = text_config_of({**thinker, "architectures": ["Qwen2_5OmniThinkerForConditionalGeneration"]})
    assert (alone["hidden_size"], alone["architectures"]) == (64, ["Qwen2ForCausalLM"])
