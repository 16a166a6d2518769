"""Each architecture through the whole engine equals transformers: chunks, neighbours, prefix hits and preemption."""

from __future__ import annotations

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

LLAMA: dict[str, Any] = tiny.LLAMA | tiny.NO_ENDS | {"max_position_embeddings": 128}
GPT2 = tiny.GPT2 | {"n_positions": 128}
OPT = tiny.OPT | {"max_position_embeddings": 128}
GEMMA = LLAMA | {"head_dim": 16, "initializer_range": 0.1, "query_pre_attn_scalar": 5, "sliding_window": 16}
# Two layers of each kind of heads, of which the last four read the keys and values of earlier ones.
GEMMA4 = GEMMA | {
    "num_hidden_layers": 8, "global_head_dim": 32, "num_kv_shared_layers": 4, "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB_SIZE, "use_double_wide_mlp": True, "pad_token_id": None,
    "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"] * 2,
}  # fmt: skip
# Every prompt is longer than the original context, so that transformers takes the long factors as well.
LONG_ROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 4,
    "long_factor": [1.0, 1.5, 3.0, 6.0],
    "partial_rotary_factor": 0.5,
}
PHI3 = LLAMA | {"hidden_size": 64, "pad_token_id": None, "sliding_window": 24}
PHI3 |= {"rope_parameters": LONG_ROPE, "original_max_position_embeddings": 16}
DEEPSEEK = LLAMA | {
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
}
CASES = {
    "GPT2LMHeadModel": GPT2 | {"bos_token_id": None, "eos_token_id": None},
    "OPTForCausalLM": OPT | {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None},
    "LlamaForCausalLM": LLAMA,
    "MistralForCausalLM": LLAMA | {"sliding_window": 16},
    "Qwen2ForCausalLM": LLAMA,
    "Qwen3ForCausalLM": LLAMA | {"head_dim": 16, "tie_word_embeddings": True},
    "MixtralForCausalLM": LLAMA | {"num_local_experts": 4},
    "Qwen3MoeForCausalLM": LLAMA | {"head_dim": 16, "num_experts": 6, "num_experts_per_tok": 3},
    "GptOssForCausalLM": LLAMA
    | {"head_dim": 16, "sliding_window": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
    "StableLmForCausalLM": LLAMA | {"hidden_size": 64},
    "DeepseekV2ForCausalLM": DEEPSEEK | {"q_lora_rank": None, "topk_method": "group_limited_greedy"},
    "DeepseekV3ForCausalLM": DEEPSEEK | {"q_lora_rank": 24},
    "FalconForCausalLM": LLAMA | {"alibi": True, "multi_query": False},
    "BloomForCausalLM": LLAMA | {"n_layer": 2, "n_head": 4, "seq_length": 128},
    "GPTJForCausalLM": GPT2 | {"rotary_dim": 8, "bos_token_id": None, "eos_token_id": None},
    "GPTNeoXForCausalLM": LLAMA | {"hidden_size": 64},
    "PhiForCausalLM": LLAMA,
    "Phi3ForCausalLM": PHI3,
    "GemmaForCausalLM": GEMMA,
    "Gemma2ForCausalLM": GEMMA | {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.0},
    "Gemma3ForCausalLM": GEMMA | {"num_hidden_layers": 3, "sliding_window_pattern": 2},
    "Gemma4ForCausalLM": GEMMA4,
}
NUM_GROUPS = {"Gemma2ForCausalLM": 2, "Gemma4ForCausalLM": 3, "GptOssForCausalLM": 2, "Gemma3ForCausalLM": 3}
"""Groups of layers with block tables of their own; 1 for models without sliding windows, or with one for all layers."""

ENGINES: dict[str, dict[str, Any]] = {
    "plain": {},
    "tiny chunks": {"max_num_batched_tokens": 8, "max_num_seqs": 8},
    "preemption": {"num_kv_blocks": 20, "block_size": 4, "max_model_len": 64},
    "no prefix cache": {"enable_prefix_caching": False},
    "drafts": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}},
}


@pytest.fixture(scope="module", params=CASES)
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[list[int]]]:
    """A random checkpoint, and what transformers continues each prompt with, one by one."""
    model_class = getattr(transformers, request.param)
    torch.manual_seed(1)
    model = model_class(model_class.config_class(**CASES[request.param])).eval()
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder, max_shard_size="20KB")  # in several files
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


class PreemptionCounter:
    """A stat logger: users' own receive every step's figures."""

    def __init__(self) -> None:
        self.num_preemptions = 0

    def record(self, scheduler_stats: Any, iteration_stats: Any) -> None:
        if scheduler_stats is not None:
            self.num_preemptions = scheduler_stats.num_preemptions

    def log_engine_initialized(self, ready: Any) -> None:
        assert ready.num_blocks > 0


@pytest.mark.parametrize("engine", ENGINES)
def test_greedy_tokens_equal_transformers(checkpoint: tuple[Path, list[list[int]]], engine: str) -> None:
    folder, continuations = checkpoint
    params = SamplingParams(temperature=0, max_tokens=NUM_OUTPUT_TOKENS, ignore_eos=True)
    counter = PreemptionCounter()
    options = {"skip_tokenizer_init": True, "stat_loggers": [counter], **ENGINES[engine]}
    if "num_kv_blocks" in options:  # a block is one of a group of layers
        options["num_kv_blocks"] *= NUM_GROUPS.get(folder.name.rstrip("0"), 1)
    with LLM(str(folder), dtype="float32", **options) as llm:
        for _ in range(2):  # the second time with prefix hits
            outputs = llm.generate(PROMPTS, params, use_tqdm=False)
            assert [list(output.outputs[0].token_ids) for output in outputs] == continuations
    assert (counter.num_preemptions > 0) == (engine == "preemption")
