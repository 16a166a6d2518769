"""The bound of a model's parameters, against the models of transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from llmstack_model_runner.architectures import ARCHITECTURES
from llmstack_model_runner.declared_sizes import ROPE_TYPES, least_parameters, rope_problems
from llmstack_model_runner.layers.rotary import KINDS

# Fields without which transformers' configuration makes no model.
NEEDED: dict[str, dict[str, Any]] = {"Lfm2MoeForCausalLM": {"layer_types": ["conv", "full_attention"] * 16}}
# Classes of the hub alone, and the class of transformers with their parameters.
OF_HUB = {"MiMoForCausalLM": "Qwen2ForCausalLM"}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_no_model_has_fewer_parameters_than_the_bound(architecture: str) -> None:
    model_class = getattr(transformers, OF_HUB.get(architecture, architecture))
    config = model_class.config_class(**NEEDED.get(architecture, {}))
    with torch.device("meta"):
        model = model_class._from_config(config)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    assert num_parameters / 256 < least_parameters(config.to_dict()) <= num_parameters


@pytest.mark.parametrize(
    ("config", "kinds"),
    [
        ({}, []),
        ({"rope_scaling": None}, []),
        ({"rope_scaling": {"type": "su"}}, []),
        ({"rope_parameters": {"rope_theta": 5.0}}, []),
        ({"rope_scaling": {"rope_type": "weird"}}, ["'weird'"]),
        ({"text_config": {"rope_scaling": {"type": "weird"}}}, ["'weird'"]),
        ({"rope_parameters": {"full": {"rope_type": "yarn"}, "windows": {"rope_type": 3}}}, ["3"]),
    ],
)
def test_rotary_embeddings_that_nothing_knows_are_named(config: dict[str, Any], kinds: list[str]) -> None:
    found = [problem.split("type ")[1].split(" is not")[0] for problem in rope_problems(config)]
    assert found == kinds


def test_the_types_of_rotary_embeddings_are_those_of_our_code_and_of_transformers() -> None:
    functions = pytest.importorskip("transformers.modeling_rope_utils").ROPE_INIT_FUNCTIONS
    older = {"su"}  # of longrope
    assert {*ROPE_TYPES} == {*KINDS, *functions} | older
