"""Families that the documentation's table of the transformers backend does not list, but names below it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from model_runner_helpers.paged_harness import PagedHarness

from llmstack_model_runner.weights import load_weights

transformers = pytest.importorskip("transformers")

from llmstack_model_runner.models.transformers_backend.model import TransformersModel  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")

PROMPT = [3, 14, 15, 92, 65, 35, 89, 79, 32, 38, 46, 26, 43, 38, 32, 79, 50, 28, 84, 19, 71]
DOCUMENT = Path(__file__).resolve().parents[4] / "docs" / "models.md"
SMALL: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.3, "pad_token_id": None,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2, "num_local_experts": 4,
    "n_routed_experts": 4, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "n_shared_experts": 1,
}  # fmt: skip
HEAD_DIM = {"head_dim": 8}
FAMILIES: dict[str, dict[str, Any]] = {
    "ArceeForCausalLM": SMALL,
    "Cohere2MoeForCausalLM": SMALL | EXPERTS,
    "Dots1ForCausalLM": SMALL | EXPERTS,
    "FlexOlmoForCausalLM": SMALL | EXPERTS,
    "GlmForCausalLM": SMALL | HEAD_DIM,
    "GraniteMoeForCausalLM": SMALL | EXPERTS,
    "HunYuanDenseV1ForCausalLM": SMALL | HEAD_DIM,
    "HunYuanMoEV1ForCausalLM": SMALL | EXPERTS | HEAD_DIM | {"moe_topk": [2, 2]},
    "JetMoeForCausalLM": SMALL | EXPERTS | {"kv_channels": 8},
    "MiniMaxM2ForCausalLM": SMALL | EXPERTS | HEAD_DIM | {"rotary_dim": 4},
    "Ministral3ForCausalLM": SMALL,
    "NanoChatForCausalLM": SMALL,
    "OlmoForCausalLM": SMALL,
    "OlmoeForCausalLM": SMALL | EXPERTS,
    "PersimmonForCausalLM": SMALL,
    "PhimoeForCausalLM": SMALL | EXPERTS,
    "Qwen2MoeForCausalLM": SMALL | EXPERTS | {"shared_expert_intermediate_size": 24},
    "SeedOssForCausalLM": SMALL | HEAD_DIM,
    "SolarOpenForCausalLM": SMALL | EXPERTS | HEAD_DIM,
    "VaultGemmaForCausalLM": SMALL | HEAD_DIM | {"sliding_window": 8},
}


@pytest.mark.full
@pytest.mark.parametrize("architecture", FAMILIES)
def test_greedy_tokens_equal_those_of_transformers(architecture: str, tmp_path: Path) -> None:
    if not hasattr(transformers, architecture):
        pytest.skip(f"the installed transformers has no {architecture}")
    model_class = getattr(transformers, architecture)
    torch.manual_seed(0)
    model = model_class._from_config(
        model_class.config_class(**FAMILIES[architecture]), attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                torch.nn.init.normal_(parameter, std=0.3)  # some are zeros or not initialized
        expected = model.generate(
            torch.tensor([PROMPT]), attention_mask=torch.ones(1, len(PROMPT), dtype=torch.long), max_new_tokens=8,
            min_new_tokens=8, do_sample=False,
        )[0, len(PROMPT) :].tolist()  # fmt: skip
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    paged = TransformersModel(config, torch.float32, torch.device("cpu"))
    load_weights(paged, tmp_path)
    assert PagedHarness(paged, torch.float32).greedy(PROMPT, 8) == expected


@pytest.mark.skipif(not DOCUMENT.is_file(), reason="the documentation is not part of the distribution")
def test_the_documentation_names_these_families() -> None:
    behind = DOCUMENT.read_text().partition("compares the greedy tokens of\nthese")[2]
    section = behind.partition("[test_every_class.py]")[0]
    assert sorted(re.findall(r"`(\w+)`", section)) == sorted(FAMILIES)
