"""Sampling defaults: the model's own, another folder's, and those given in their place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llmstack_llm.model.generation_config import GenerationConfigError, sampling_defaults

MODELS = {"temperature": 0.6, "max_new_tokens": 9, "do_sample": True, "top_k": None}


@pytest.mark.parametrize(
    ("source", "overrides", "expected"),
    [
        ("auto", {}, {"temperature": 0.6, "max_tokens": 9}),
        ("vllm", {}, {}),
        ("auto", {"temperature": 0.1, "top_k": 4}, {"temperature": 0.1, "top_k": 4, "max_tokens": 9}),
        ("vllm", {"max_new_tokens": 3}, {"max_tokens": 3}),
        ("auto", {"max_tokens": 3}, {"temperature": 0.6, "max_tokens": 3}),
        (
            "vllm",
            {"presence_penalty": 1.5, "frequency_penalty": 0, "ignore_eos": True, "seed": 7},
            {"presence_penalty": 1.5, "frequency_penalty": 0, "ignore_eos": True, "seed": 7},
        ),
    ],
)
def test_overrides_win_over_the_models_own(source: str, overrides: dict[str, Any], expected: dict[str, Any]):
    assert sampling_defaults(MODELS, source, overrides) == expected


@pytest.mark.parametrize(
    ("generation", "origin"),
    [
        (MODELS, "the model's generation_config.json"),
        (MODELS | {"registered_name": "theirs"}, "the registration of theirs"),
    ],
)
def test_the_log_names_the_source_of_defaults(
    generation: dict[str, Any], origin: str, caplog: pytest.LogCaptureFixture
):
    sampling_defaults(generation, "auto", {})
    assert caplog.messages == [
        f"{origin} sets sampling defaults: temperature=0.6, max_new_tokens=9 (generation_config=vllm ignores it)"
    ]


def test_another_folders_file_may_take_the_place_of_the_models(tmp_path: Path):
    (tmp_path / "generation_config.json").write_text(json.dumps({"top_p": 0.5}))
    assert sampling_defaults(MODELS, str(tmp_path), {}) == {"top_p": 0.5}


@pytest.mark.parametrize(
    ("source", "overrides", "word"),
    [
        ("/nowhere", {}, "generation_config.json"),
        ("auto", {"temprature": 1}, "'temprature' is none of temperature"),
        ("auto", {"top_k": "4"}, "top_k must be a number"),
        ("auto", {"top_k": True}, "top_k must be a number"),
        ("auto", {"presence_penalty": True}, "presence_penalty must be a number"),
        ("auto", {"ignore_eos": 1}, "ignore_eos must be true or false"),
        ("auto", {"max_tokens": 1, "max_new_tokens": 1}, "not both"),
    ],
)
def test_what_cannot_be_used_is_named(source: str, overrides: dict[str, Any], word: str):
    with pytest.raises(GenerationConfigError, match=word):
        sampling_defaults({}, source, overrides)
