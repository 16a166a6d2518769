"""A last layer that computes only the tokens with logits gives the same logits, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from llmstack_kernels.testing import runs_native_kernels
from llmstack_model_runner.model_runner import ModelRunner
from llmstack_model_runner.models.numeric_contract import HOLDS
from llmstack_model_runner.steps import computation
from llmstack_model_runner.testing import StepDriver, write_gpt2_checkpoint, write_random_weights
from llmstack_types import ModelRunnerConfig, SamplingParams
from llmstack_types.vocabulary import KVCacheDType

NUM_BLOCKS = 64
BASE: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 48, "intermediate_size": 60, "num_hidden_layers": 2, "num_attention_heads": 3,
    "max_position_embeddings": 256,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {"architectures": ["GPT2LMHeadModel"], "vocab_size": 97, "n_embd": 48, "n_layer": 2, "n_head": 3},
    "norms behind": BASE | {"architectures": ["OPTForCausalLM"], "ffn_dim": 60, "do_layer_norm_before": False},
    "parallel": BASE | {"architectures": ["GPTNeoXForCausalLM"], "rotary_pct": 0.5},
    "parallel behind one norm": BASE | {"architectures": ["PhiForCausalLM"]},
    "llama": BASE
    | {"architectures": ["LlamaForCausalLM"], "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16},
    "windows": BASE
    | {
        "architectures": ["Gemma2ForCausalLM"], "num_key_value_heads": 1, "head_dim": 16, "sliding_window": 21,
        "query_pre_attn_scalar": 5, "hidden_activation": "gelu_pytorch_tanh",
    },
    "latents": BASE
    | {
        "architectures": ["DeepseekV3ForCausalLM"], "first_k_dense_replace": 1,
        "n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3, "moe_intermediate_size": 22,
        "kv_lora_rank": 48, "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16,
    },
    "selected latents": BASE
    | {
        "architectures": ["GlmMoeDsaForCausalLM"], "first_k_dense_replace": 1, "indexer_types": ["full", "shared"],
        "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 22, "index_topk": 12,
        "kv_lora_rank": 48, "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16,
    },
    "experts": BASE
    | {
        "architectures": ["Qwen3MoeForCausalLM"], "num_key_value_heads": 3, "head_dim": 16, "num_experts": 5,
        "num_experts_per_tok": 3, "moe_intermediate_size": 22,
    },
}  # fmt: skip


def run_steps(folder: Path, dtype: str) -> tuple[list[torch.Tensor], list[int]]:
    """Logits of each step in which a row samples, and how many states the model gave in every step."""
    config = ModelRunnerConfig(str(folder), dtype=dtype, max_model_len=200, max_num_seqs=4, block_size=16, device="cpu")
    runner = ModelRunner(config)
    runner.load_model()
    runner.initialize_kv_cache(NUM_BLOCKS)
    assert runner.backends()["numeric_contract"] == HOLDS
    logits: list[torch.Tensor] = []
    num_states: list[int] = []
    model: Any = runner._model
    forward, compute_logits = model.forward, model.compute_logits

    def note_states(*arguments: Any) -> torch.Tensor:
        hidden = forward(*arguments)
        num_states.append(len(hidden))
        return hidden

    def note_logits(hidden: torch.Tensor) -> torch.Tensor:
        logits.append(compute_logits(hidden).clone())
        return logits[-1].clone()

    model.forward, model.compute_logits = note_states, note_logits
    driver = StepDriver(runner, NUM_BLOCKS)
    for name, length in {"whole": 90, "chunk": 70, "short": 3}.items():
        driver.add(name, [(7 * i + length) % 97 for i in range(length)], SamplingParams(temperature=0.0))
    driver.step({"chunk": 20})
    driver.step({"whole": 90, "chunk": 9, "short": 3})
    driver.step({"whole": 1, "chunk": 41, "short": 1}, {"whole": [5, 6], "short": [1]})
    assert driver.errors == {}
    return logits, num_states


@pytest.mark.skipif(
    not runs_native_kernels(), reason="needs native kernels: other ones may depend on the number of rows"
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", CONFIGS)
def test_omitted_tokens_change_no_logits(
    name: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name]), encoding="utf-8")
    write_random_weights(tmp_path, seed=1, spread=0.3)
    few, num_states = run_steps(tmp_path, dtype)
    assert num_states == [20, 2, 6]  # no row samples in the first step
    monkeypatch.setattr(computation, "_needs_few_tokens", lambda *_: False)
    whole, num_states = run_steps(tmp_path, dtype)
    assert num_states == [20, 102, 46]
    assert len(few) == len(whole) == 2
    assert all(torch.equal(*pair) for pair in zip(few, whole, strict=True))


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
@pytest.mark.parametrize("num_heads", [3, 6])
def test_log_probabilities_of_another_prompt_change_no_logits(
    num_heads: int, kv_cache_dtype: KVCacheDType, tmp_path: Path
) -> None:
    """With 6 heads of 8 PyTorch attends, whose bits for one token are not those for several of a row."""
    write_gpt2_checkpoint(tmp_path, n_embd=48, n_head=num_heads)
    config = ModelRunnerConfig(
        str(tmp_path), dtype="float32", max_model_len=100, max_num_seqs=2, block_size=16, device="cpu",
        kv_cache_dtype=kv_cache_dtype,
    )  # fmt: skip
    runner = ModelRunner(config)
    runner.load_model()
    runner.initialize_kv_cache(NUM_BLOCKS)
    found = []
    for count in (None, 0):
        driver = StepDriver(runner, NUM_BLOCKS)
        for length in (3, 9, 30):
            prompt = [(7 * i + length) % 97 for i in range(length)]
            driver.add("own", prompt, SamplingParams(temperature=0.0, logprobs=5))
            driver.add("other", prompt[:2], SamplingParams(temperature=0.0, prompt_logprobs=count))
            found.append(driver.step({"own": length, "other": 2}).logprobs["own"])
            driver.remove("own")
            driver.remove("other")
        driver.step({})
    assert found[:3] == found[3:]
