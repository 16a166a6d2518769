"""The code of transformers through the whole engine: chunks, prefix hits and preemption change nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from model_runner_helpers import tiny_configs as tiny

from llmstack_llm import LLM, SamplingParams

VOCAB_SIZE = 97
NUM_OUTPUT_TOKENS = 12
PROMPTS = tiny.PROMPTS

SMALL: dict[str, Any] = tiny.SMALL | tiny.NO_ENDS | {"max_position_embeddings": 128}
PER_LAYER_HEADS = {"head_dim": 16}
CASES: dict[str, dict[str, Any]] = {
    "Olmo2ForCausalLM": SMALL,
    "Cohere2ForCausalLM": SMALL | {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]},
    "GraniteForCausalLM": SMALL | {"logits_scaling": 4.0, "attention_multiplier": 0.2},
    "Glm4ForCausalLM": SMALL | {"head_dim": 16},
    "Gemma4ForCausalLM": SMALL
    | PER_LAYER_HEADS
    | {
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "sliding_window": 16,
        "global_head_dim": 32,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": VOCAB_SIZE,
        "hidden_size_per_layer_input": 8,
        "pad_token_id": 0,
    },
    "Dots3NoteForCausalLM": SMALL
    | {
        "num_hidden_layers": 5, "num_key_value_heads": 4, "moe_intermediate_size": 24, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "n_shared_experts": 1, "shared_experts_intermediate_size": 24, "q_lora_rank": 16,
        "kv_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12, "head_dim": 16,
        "sliding_window": 16, "swa_num_attention_heads": 2, "swa_num_key_value_heads": 2, "swa_q_lora_rank": 12,
        "swa_kv_lora_rank": 20, "swa_head_dim": 20, "swa_qk_nope_head_dim": 12, "swa_v_head_dim": 12,
        "index_head_dim": 16, "index_n_heads": 2,
    },
    "MiMoV2FlashForCausalLM": SMALL
    | PER_LAYER_HEADS
    | {
        "num_hidden_layers": 3,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "v_head_dim": 8,
        "sliding_window": 16,
    },
}  # fmt: skip
NUM_GROUPS = {"Dots3NoteForCausalLM": 3, "Cohere2ForCausalLM": 2, "Gemma4ForCausalLM": 2, "MiMoV2FlashForCausalLM": 3}
ENGINES: dict[str, dict[str, Any]] = {
    "plain": {},
    "tiny chunks": {"max_num_batched_tokens": 8, "max_num_seqs": 8},
    "no windows": {"disable_hybrid_kv_cache_manager": True},
    "preemption": {"num_kv_blocks": 20, "block_size": 4, "max_model_len": 64},
}
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_OUTPUT_TOKENS, ignore_eos=True)


def make_checkpoint(folder: Path, architecture: str, values: dict[str, Any]) -> Any:
    model_class = getattr(transformers, architecture)
    torch.manual_seed(1)
    model = model_class(model_class.config_class(**values)).eval()
    model.save_pretrained(folder, max_shard_size="20KB")  # in several files
    return model


def generate(folder: Path, **options: Any) -> list[list[int]]:
    """What each prompt is continued with, the second time too, when its prefix is found."""
    with LLM(str(folder), dtype="float32", skip_tokenizer_init=True, **options) as llm:
        texts = [
            [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]
            for _ in range(2)
        ]
    assert texts[0] == texts[1]
    return texts[0]


@pytest.fixture(scope="module", params=[
    pytest.param(name, marks=pytest.mark.full if name.startswith("Dots3") else ()) for name in CASES
])  # fmt: skip
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[list[int]]]:
    """A random checkpoint, and what transformers continues each prompt with, one by one."""
    folder = tmp_path_factory.mktemp(request.param)
    model = make_checkpoint(folder, request.param, CASES[request.param])
    continuations = []
    for prompt in PROMPTS:
        output = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=NUM_OUTPUT_TOKENS,
            do_sample=False,
        )
        continuations.append(output[0, len(prompt) :].tolist())
    return folder, continuations


@pytest.mark.parametrize(
    "engine",
    ["plain", "preemption", *(pytest.param(name, marks=pytest.mark.full) for name in ("tiny chunks", "no windows"))],
)
def test_greedy_tokens_equal_transformers_generate(checkpoint: tuple[Path, list[list[int]]], engine: str) -> None:
    folder, continuations = checkpoint
    options = dict(ENGINES[engine])
    if "num_kv_blocks" in options:
        options["num_kv_blocks"] *= NUM_GROUPS.get(
            folder.name.rstrip("0123456789"), 1
        )  # each group of layers has blocks of its own
    assert generate(folder, model_impl="transformers", **options) == continuations


def test_our_llama_and_theirs_write_the_same(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "LlamaForCausalLM", SMALL)
    assert generate(tmp_path) == generate(tmp_path, model_impl="transformers")


def test_the_server_says_whose_code_runs_and_writes_the_published_story(
    serve: Callable[..., Any], stories_path: Path
) -> None:
    case = json.loads((stories_path / "golden.json").read_text())["greedy_from_transformers_float32"][0]
    with serve(str(stories_path), "--model-impl", "transformers", "--dtype", "float32") as server:
        backends = server.get_json("/server_info")["engine"]["backends"]
        assert backends["model"] == f"transformers {transformers.__version__}"
        answer = server.client.completions.create(
            model=str(stories_path),
            prompt=case["prompt_token_ids"],
            max_tokens=len(case["output_token_ids"]),
            temperature=0,
            extra_body={"return_token_ids": True, "ignore_eos": True},
        )
        assert answer.choices[0].model_extra["token_ids"] == case["output_token_ids"]
        assert "LlamaForCausalLM (transformers" in server.log
