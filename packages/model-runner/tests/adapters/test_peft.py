"""Adapters that peft writes are served as peft merges them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from llmstack_model_runner.model_runner import ModelRunner
from llmstack_model_runner.testing import StepDriver, identity_of
from llmstack_types import ModelRunnerConfig, SamplingParams

pytestmark = [
    # What peft calls of newer versions of transformers.
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    # It looks for patterns among modules only, and applies them to parameters all the same.
    pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning"),
]

NUM_TOKENS, PROMPT = 10, [5, 17, 2, 44, 8]
SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_hidden_layers": 2, "vocab_size": 97, "max_position_embeddings": 64,
}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("Llama", SIZES, {"target_modules": ["q_proj", "down_proj"], "use_rslora": True}),
    "qwen2": ("Qwen2", SIZES, {"target_modules": r".*\.layers\.1\..*_proj", "rank_pattern": {"q_proj": 2}}),
    "gpt2": (
        "GPT2",
        {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 64, "vocab_size": 97},
        {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True, "alpha_pattern": {"c_attn": 3}},
    ),
    "mixtral": (
        "Mixtral",
        {**SIZES, "num_local_experts": 4},
        {"target_modules": ["q_proj", "v_proj", "o_proj"], "layers_to_transform": [1]},
    ),
    "llama with embedding and head": (
        "Llama", SIZES, {"target_modules": ["embed_tokens", "lm_head", "q_proj"], "rank_pattern": {"lm_head": 3}},
    ),
    "gemma with embedding": (
        "Gemma", {**SIZES, "head_dim": 8, "tie_word_embeddings": False}, {"target_modules": ["embed_tokens"]},
    ),
}  # fmt: skip
CASES |= {
    "llama with a head of its own": (
        "Llama", SIZES, {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    ),
    "qwen2 with embedding and head of its own": (
        "Qwen2", SIZES, {"target_modules": ["v_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
    ),
    "gemma with an embedding of its own": (
        "Gemma", {**SIZES, "head_dim": 8, "tie_word_embeddings": False},
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
    ),
}  # fmt: skip
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
OF_EXPERTS = {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2}
CASES |= {
    "mixtral with experts": ("Mixtral", OF_EXPERTS, {"target_modules": ["q_proj"], "target_parameters": EXPERTS}),
    "mixtral with one product of experts": (
        "Mixtral", OF_EXPERTS, {"target_modules": [], "target_parameters": EXPERTS[1:], "use_rslora": True},
    ),
    "qwen3 with experts": (
        "Qwen3Moe",
        {
            **SIZES, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8,
            "norm_topk_prob": True,
        },
        {
            "target_modules": ["v_proj"], "target_parameters": EXPERTS,
            "rank_pattern": {"experts.down_proj": 3}, "alpha_pattern": {"experts.down_proj": 5},
        },
    ),
    "gpt-oss with experts": (
        "GptOss", {**OF_EXPERTS, "head_dim": 8, "sliding_window": 5},
        {"target_modules": ["o_proj"], "target_parameters": EXPERTS},
    ),
}  # fmt: skip
# Merging into a table that embedding and head share would change both, so these are compared with the adapter itself.
SHARED_TABLE_CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "embedding": ("Llama", {**SIZES, "tie_word_embeddings": True}, {"target_modules": ["embed_tokens"]}),
    "head": ("Llama", {**SIZES, "tie_word_embeddings": True}, {"target_modules": ["lm_head"]}),
    "both as one": (
        "GPT2",
        {**CASES["gpt2"][1], "tie_word_embeddings": True},
        {"target_modules": ["wte"], "ensure_weight_tying": True, "fan_in_fan_out": True},
    ),
}


@pytest.mark.full  # importing peft takes seconds
@pytest.mark.parametrize("name", CASES)
def test_tokens_are_those_of_the_model_that_peft_merges(name: str, tmp_path: Path) -> None:
    adapted = make_adapted(*CASES[name], tmp_path)
    merged = adapted.merge_and_unload()
    expected = generate(merged)
    adapted_tokens, base_tokens, logprobs = serve(tmp_path)
    assert adapted_tokens == expected != base_tokens
    with torch.no_grad():
        logits = merged(torch.tensor([PROMPT + expected[:-1]])).logits[0, len(PROMPT) - 1 :]
    right = torch.log_softmax(logits.double(), dim=-1)
    torch.testing.assert_close(logprobs, right, rtol=0, atol=2e-5 * float(logits.abs().max()))


@pytest.mark.full
@pytest.mark.parametrize("name", SHARED_TABLE_CASES)
def test_tokens_with_a_shared_table_are_those_of_the_adapter_in_peft(name: str, tmp_path: Path) -> None:
    expected = generate(make_adapted(*SHARED_TABLE_CASES[name], tmp_path))
    adapted_tokens, base_tokens, _ = serve(tmp_path)
    assert adapted_tokens == expected != base_tokens


def make_adapted(prefix: str, sizes: dict[str, Any], options: dict[str, Any], folder: Path) -> Any:
    """A random model with a random adapter, both stored."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = getattr(transformers, f"{prefix}Config")(**sizes, bos_token_id=None, eos_token_id=None)
    config.initializer_range = 0.3
    base = getattr(transformers, f"{prefix}ForCausalLM" if prefix != "GPT2" else "GPT2LMHeadModel")(config).eval()
    base.save_pretrained(folder / "base")
    lora = peft.LoraConfig(r=4, lora_alpha=8, init_lora_weights=False, task_type="CAUSAL_LM", **options)
    adapted = peft.get_peft_model(base, lora).eval()
    with torch.no_grad():
        for key, factor in adapted.named_parameters():
            if "lora_embedding_" in key:  # they would be larger than the table
                factor.mul_(0.3)
            if "modules_to_save" in key and key.endswith("weight"):
                factor.copy_(torch.randn_like(factor) * 0.3)
    adapted.save_pretrained(folder / "adapter")
    return adapted


def generate(model: Any) -> list[int]:
    """Greedy tokens of transformers."""
    found: list[int] = model.generate(
        input_ids=torch.tensor([PROMPT]), max_new_tokens=NUM_TOKENS, do_sample=False, pad_token_id=0, eos_token_id=None
    )[0, len(PROMPT) :].tolist()
    return found


def serve(folder: Path) -> tuple[list[int], list[int], torch.Tensor]:
    """Greedy tokens with the adapter and without, and log-probabilities of all tokens with it."""
    settings = ModelRunnerConfig(
        str(folder / "base"), dtype="float32", max_model_len=64, enable_lora=True, max_lora_rank=8
    )
    runner = ModelRunner(settings)
    runner.load_model()
    runner.initialize_kv_cache(16)
    identity = identity_of(folder / "adapter")
    runner.add_adapter(identity, runner.read_adapter(identity, str(folder / "adapter")))
    driver = StepDriver(runner, 16)
    num_tokens = SIZES["vocab_size"]
    driver.add("adapted", PROMPT, SamplingParams(temperature=0.0, logprobs=num_tokens), lora_name=identity)
    driver.add("base", PROMPT, SamplingParams(temperature=0.0))
    logprobs = torch.empty(NUM_TOKENS, num_tokens, dtype=torch.float64)
    for step in range(NUM_TOKENS):
        output = driver.step({name: driver.num_left(name) for name in ("adapted", "base")})
        ((token_ids, values, *_),) = output.logprobs["adapted"]
        logprobs[step, torch.tensor(token_ids)] = torch.tensor(values, dtype=torch.float64)
    return driver.outputs["adapted"], driver.outputs["base"], logprobs
