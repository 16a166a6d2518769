"""Which repositories with code of their own can be served without it."""

from __future__ import annotations

from typing import Any

import pytest

from llmstack_llm.model.repository_code import repository_code_problem

PHI3 = {
    "architectures": ["Phi3ForCausalLM"],
    "model_type": "phi3",
    "auto_map": {
        "AutoConfig": "configuration_phi3.Phi3Config",
        "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM",
    },
}


KIMI = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "kimi_k2",
    "auto_map": {
        "AutoConfig": "configuration_deepseek.DeepseekV3Config",
        "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM",
    },
}


@pytest.mark.parametrize("config", [{}, {"auto_map": {}}, {"auto_map": None}, PHI3, KIMI])
def test_no_code_and_code_of_a_known_model_are_no_problem(config: dict[str, Any]):
    assert repository_code_problem(config) is None


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"model_type": "phi4"}, "Phi3Config"),
        ({"architectures": ["LlamaForCausalLM"]}, "Phi3Config"),
        ({"architectures": ["MineForCausalLM"]}, "Phi3Config"),
        ({"architectures": [{}]}, "Phi3Config"),
        ({"auto_map": {"AutoModel": "modeling.MineModel"}}, "MineModel"),
        ({"auto_map": {"AutoTokenizer": ["tokenization.MineTokenizer", None]}}, "MineTokenizer"),
        ({"auto_map": "modeling.MineModel"}, "MineModel"),
    ],
)
def test_architecture_model_type_and_class_names_must_all_be_known(changes: dict[str, Any], word: str):
    problem = repository_code_problem({**PHI3, **changes})
    assert problem is not None
    assert "code from a repository never runs" in problem
    assert word in problem or changes.get("model_type")
