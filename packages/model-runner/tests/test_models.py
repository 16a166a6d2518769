"""The table of models is closed, configurations are checked, and a real trained model writes its published story."""

from __future__ import annotations

import json
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any

import pytest
import torch

from llmstack_model_runner import models
from llmstack_model_runner.models import load_model_class, supported_architectures
from llmstack_model_runner.models.gpt2 import GPT2
from llmstack_model_runner.models.testing import PagedHarness
from llmstack_model_runner.weights import load_weights

STORIES = Path(__file__).resolve().parents[3].parent / "shared" / "models" / "stories260k"
CPU = torch.device("cpu")
LLAMA: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": 50,
}


@pytest.mark.skipif(not STORIES.is_dir(), reason="the shared model stories260k is not there")
def test_stories260k_writes_its_published_story() -> None:
    golden = json.loads((STORIES / "golden.json").read_text())
    config = json.loads((STORIES / "config.json").read_text())
    model = load_model_class(config["architectures"][0])(config, torch.float32, CPU)
    load_weights(model, STORIES)
    harness = PagedHarness(model, torch.float32, num_blocks=64, block_size=16)
    cases = [golden["published"], *golden["greedy_from_transformers_float32"]]
    for number, case in enumerate(cases):
        expected = case["output_token_ids"]
        assert harness.greedy(case["prompt_token_ids"], len(expected), f"case {number}") == expected


def test_an_unknown_architecture_is_refused_with_the_list_of_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'BertModel' is not supported; supported are .*GPT2LMHeadModel, "):
        load_model_class("BertModel")


def test_every_architecture_of_the_table_loads() -> None:
    assert {load_model_class(name).__name__ for name in supported_architectures()} >= {"GPT2", "Llama", "OPT", "Qwen3"}


def test_installed_packages_add_models_but_replace_none(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = EntryPoints(
        EntryPoint(name, "llmstack_model_runner.models.gpt2:GPT2", models.ENTRY_POINT_GROUP)
        for name in ("TheirLMHeadModel", "LlamaForCausalLM")
    )
    monkeypatch.setattr(models, "entry_points", lambda **keys: entries.select(**keys))
    assert load_model_class("TheirLMHeadModel") is GPT2
    assert load_model_class("LlamaForCausalLM") is not GPT2
    assert "TheirLMHeadModel" in supported_architectures()


@pytest.mark.parametrize(
    ("architecture", "changes", "words"),
    [
        ("LlamaForCausalLM", {"hidden_size": "16"}, "hidden_size"),
        ("LlamaForCausalLM", {"num_hidden_layers": 0}, "num_hidden_layers"),
        ("LlamaForCausalLM", {"hidden_act": "gelu"}, "activation 'gelu'"),
        ("LlamaForCausalLM", {"num_attention_heads": 3, "num_key_value_heads": 2}, "share"),
        ("LlamaForCausalLM", {"rms_norm_eps": "small"}, "rms_norm_eps"),
        ("LlamaForCausalLM", {"mlp_bias": 1}, "mlp_bias"),
        ("LlamaForCausalLM", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic' is not supported"),
        ("LlamaForCausalLM", {"rope_scaling": {"rope_type": "linear"}}, "lacks factor"),
        ("LlamaForCausalLM", {"rope_scaling": "linear"}, "must be an object"),
        ("GPT2LMHeadModel", {"n_embd": 10, "n_head": 3}, "multiple"),
        ("GPT2LMHeadModel", {"activation_function": "swish"}, "swish"),
        ("GPT2LMHeadModel", {"add_cross_attention": True}, "add_cross_attention"),
        ("OPTForCausalLM", {"num_attention_heads": 3}, "multiple"),
        ("OPTForCausalLM", {"layer_norm_elementwise_affine": False}, "layer_norm_elementwise_affine"),
    ],
)
def test_configurations_that_cannot_be_served_are_refused_by_field(
    architecture: str, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        load_model_class(architecture)(LLAMA | changes, torch.float32, CPU)


@pytest.mark.parametrize(
    ("architecture", "config"),
    [
        ("LlamaForCausalLM", {"hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32}),
        ("MistralForCausalLM", {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8}),
        ("Qwen3ForCausalLM", {"hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 8}),
    ],
)
def test_true_shapes_are_read_from_the_configuration(architecture: str, config: dict[str, Any]) -> None:
    sizes = {"intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 32, "max_position_embeddings": 128}
    model = load_model_class(architecture)(sizes | config, torch.bfloat16, CPU)
    assert model.kv_spec.head_dim == 128
    assert model.kv_spec.num_kv_heads == config.get("num_key_value_heads", 32)
    assert model.kv_spec.max_model_len == 128
    slots = model.slots()
    assert slots["model.layers.0.self_attn.k_proj.weight"].shape == (
        model.kv_spec.num_kv_heads * 128,
        config["hidden_size"],
    )


def test_one_layer_of_a_large_model_runs_with_made_up_weights() -> None:
    config = {"hidden_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 2, "num_hidden_layers": 1}
    model = load_model_class("LlamaForCausalLM")(
        {"intermediate_size": 2048, "vocab_size": 1000, **config}, torch.bfloat16, CPU
    )
    load_weights(model, "", "dummy")
    assert PagedHarness(model, torch.bfloat16).step([("a", [1, 2, 3])]).isfinite().all()
