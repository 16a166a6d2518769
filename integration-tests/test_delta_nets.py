"""Delta nets with experts and adapters: ranks, chunks and hits write the tokens of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from state_tokens import (
    VOCAB_SIZE,
    check_adapter,
    check_captured_decodes,
    cuts,
    new_model,
    tokens_of,
    tokens_of_transformers,
)

from llmstack_kernels.testing import runs_native_kernels

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 16,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "num_experts": 6, "num_experts_per_tok": 2,
    "moe_intermediate_size": 24, "shared_expert_intermediate_size": 32, "initializer_range": 0.1,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
MODELS = {"next": ("Qwen3NextForCausalLM", {"intermediate_size": 48, "mlp_only_layers": [1]}), "3.5": (
    "Qwen3_5MoeForCausalLM", {})}  # fmt: skip


@pytest.fixture(scope="module", params=MODELS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """With the names and the older configuration of the hub: a tensor per expert, no `layer_types`."""
    architecture, others = MODELS[request.param]
    model = new_model(architecture, SIZES | others)
    folder = tmp_path_factory.mktemp("delta_nets")
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    rope = config.pop("rope_parameters")
    del config["layer_types"]
    published = {"full_attention_interval": 4, "rope_theta": rope["rope_theta"], "partial_rotary_factor": 0.25}
    (folder / "config.json").write_text(json.dumps(config | published))
    return folder, model


@pytest.fixture(scope="module")
def expected(checkpoint: tuple[Path, Any]) -> list[list[int]]:
    return tokens_of_transformers(checkpoint[1])


RANKS = {"tensor_parallel_size": 2}


@pytest.mark.parametrize("options", cuts(RANKS, RANKS | {"enable_expert_parallel": True}), ids=str)
def test_greedy_tokens_are_those_of_transformers(
    checkpoint: tuple[Path, Any], expected: list[list[int]], options: dict[str, Any]
) -> None:
    assert tokens_of(checkpoint[0], **options) == expected


@pytest.mark.full
def test_an_adapter_writes_the_tokens_of_its_merged_weights(checkpoint: tuple[Path, Any], tmp_path: Path) -> None:
    names = ["in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_qkvz", "in_proj_ba", "out_proj", "q_proj", "o_proj"]
    check_adapter(checkpoint[0], tmp_path, [*names, "shared_expert.up_proj"])


@pytest.mark.skipif(not runs_native_kernels(), reason="only native steps are captured")
def test_captured_decodes_have_the_bits_of_eager_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the dense model."""
    torch.manual_seed(4)
    sizes = {name: value for name, value in SIZES.items() if "expert" not in name and "moe" not in name}
    made = transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(**sizes, intermediate_size=96))
    made.save_pretrained(tmp_path)
    check_captured_decodes(tmp_path, monkeypatch)
