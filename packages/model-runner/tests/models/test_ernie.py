"""ERNIE 4.5 with experts as published: corrections beside the router, and a layer that guesses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from model_runner_helpers.paged_harness import PagedHarness
from safetensors.torch import load_file, save_file

from llmstack_model_files import read_model_config
from llmstack_model_runner.layers.grouped_routing import GroupedRouting
from llmstack_model_runner.models import load_model_class
from llmstack_model_runner.weights import load_weights

transformers = pytest.importorskip("transformers")

PROMPT = [(7 * i + 3) % 97 for i in range(40)]
SIZES: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 5, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.3, "moe_num_experts": 6, "moe_k": 3,
    "moe_intermediate_size": 24, "moe_layer_interval": 2, "moe_layer_end_index": 3,
}  # fmt: skip


@pytest.mark.parametrize("changes", [{}, {"moe_num_shared_experts": 0, "tie_word_embeddings": False}], ids=str)
def test_a_checkpoint_with_the_hubs_names_has_transformers_logits(changes: dict[str, Any], tmp_path: Path) -> None:
    torch.manual_seed(0)
    made = transformers.Ernie4_5_MoeConfig(**SIZES, **changes)
    reference = transformers.Ernie4_5_MoeForCausalLM(made).eval()
    for name, parameter in reference.named_parameters():
        if "norm" in name or "correction" in name:
            parameter.data.add_(torch.randn_like(parameter) * 0.2)
    reference.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    corrections = [name for name in tensors if "e_score_correction_bias" in name]
    assert {tensors[name].shape for name in corrections} == {(1, 6)}
    assert all("mlp.moe_statics." in name for name in corrections)
    guessing = {
        "model.mtp_emb_norm.0.weight": torch.ones(32),
        "model.mtp_block.0.input_layernorm.weight": torch.ones(32),
    }
    save_file(tensors | guessing, tmp_path / "model.safetensors")
    config = read_model_config(tmp_path, {})
    model = load_model_class("Ernie4_5_MoeForCausalLM")(config, torch.float32, torch.device("cpu"))
    load_weights(model, tmp_path)
    with torch.no_grad():
        expected = reference(torch.tensor([PROMPT])).logits[0]
    found = PagedHarness(model, torch.float32).step([("a", PROMPT)])
    assert (found - expected).abs().max() <= 2e-5 * expected.abs().max()


def test_biases_of_experts_are_refused(tmp_path: Path) -> None:
    config = json.loads(transformers.Ernie4_5_MoeConfig(**SIZES, use_bias=True).to_json_string())
    with pytest.raises(ValueError, match="use_bias True is not supported"):
        load_model_class("Ernie4_5_MoeForCausalLM")(config, torch.float32, torch.device("cpu"))


def test_a_correction_of_a_softmax_changes_the_choice_and_not_the_weights() -> None:
    routing = GroupedRouting(is_corrected=True, is_softmax=True, is_normalised=True)
    logits = torch.tensor([[1.0, 2.0, 3.0, 0.0]])
    shares, chosen = routing.choose(logits, torch.tensor([0.0, 0.0, 0.0, 9.0]), 2)
    assert chosen.tolist() == [[3, 2]]
    own = logits.softmax(-1)[0, [3, 2]]
    torch.testing.assert_close(shares[0], own / own.sum())
